/* Shifts the wall clock of the processes that preload it by the seconds in the file $SHIFT_FILE (a double), which may change at any time.
 * Monotonic clocks stay. Waits until an absolute wall-clock time are told to the kernel in its own time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *shift;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SHIFT_FILE");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *there = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (there != MAP_FAILED) shift = there;
  close(file);
}

static long seconds(void) { return shift ? (long)*shift : 0; }

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, at);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += seconds();
  return result;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

static struct timespec unshifted(const struct timespec *until) {
  struct timespec found = *until;
  if (found.tv_sec > 1000000000) found.tv_sec -= seconds(); /* else it is of a monotonic clock */
  return found;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec there = unshifted(until);
  return real(cond, mutex, &there);
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec there = unshifted(until);
  return real(sem, &there);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec there = unshifted(until);
  return real(mutex, &there);
}
