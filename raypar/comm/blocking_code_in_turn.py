"""Runs several pieces of blocking code of one worker that wait for each other: the first in the caller's thread, each other one
in a thread of its own. One of them runs at a time.

A piece that cannot go on gives its turn directly to one that can: a switch of threads takes 10 us, and by way of a scheduler
between them (`comm.routines_in_turn`) it would be two.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from raypar.comm.blocking_code_as_routine import MOST_TRIES_TO_END, KeepGenerators, running_in
from raypar.comm.routine import RoutineWait, RoutineWork
from raypar.comm.routines_in_turn import is_posted
from raypar.errors import GroupAborted

T = TypeVar("T")


def run_blocking_in_turn(
    works: Sequence[Callable[[], T]], keep_generators: KeepGenerators, wait: Callable[[RoutineWait | RoutineWork], None]
) -> list[T]:
    """Run all to their ends; returns their results, in their order.

    The first runs until it waits for what is not done, then another one, and so on. `wait`: called where none can go on, with
    what one of them waits for; what it raises is raised in that one. What a piece raises ends the others, and is raised. If
    they wait for each other for ever, because they make unequal calls, that is the error of a wait. `keep_generators`: called
    where a piece gives its turn away, so that each finds the generators as it left them.
    """
    return _Turns(works, keep_generators, wait).run()


class _Turns(Generic[T]):
    """Whose turn it is, and what the others wait for. Only the thread whose turn it is touches it."""

    def __init__(
        self, works: Sequence[Callable[[], T]], keep: KeepGenerators, wait: Callable[[RoutineWait | RoutineWork], None]
    ) -> None:
        self._works, self._keep, self._wait = works, keep, wait
        self._waits: dict[int, RoutineWait | None] = dict.fromkeys(range(len(works)))
        """Piece that has not ended -> what it waits for; None: it may go on."""
        self._turns = [threading.Lock() for _ in works]
        """By piece: released when its thread may go on."""
        for turn in self._turns:
            turn.acquire()
        self._threads: dict[int, threading.Thread] = {}
        """The threads of the pieces but the first, once they have begun."""
        self._ended: list[int] = []
        """Those of them that have ended."""
        self._thrown: dict[int, Exception] = {}
        """Piece -> the error to raise where it waits."""
        self._results: dict[int, T] = {}
        self._failed: BaseException | None = None
        """What a piece has raised: the others are to end."""
        self._tries = 0
        """How many times they were told."""
        self._torch_threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        """The stream to which all give work on a GPU; None without one."""

    def run(self) -> list[T]:
        """See `run_blocking_in_turn`."""
        self._run(0)
        if self._waits:
            self._pass_on(0)
        for place in self._ended:
            self._threads[place].join()
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # its traceback has this frame: the cycle would hold what the pieces have computed
        return [self._results[place] for place in range(len(self._works))]

    def _run(self, place: int) -> None:
        """Run a piece to its end."""
        try:
            # Otherwise autograd would compute on a device in a thread of its own, which cannot take turns.
            with running_in(_Piece(self, place)), torch.autograd.set_multithreading_enabled(False):
                self._results[place] = self._works[place]()
        except BaseException as error:
            if self._failed is None:
                self._failed = error
        del self._waits[place]

    def _run_in_thread(self, place: int) -> None:
        torch.set_num_threads(self._torch_threads)  # a thread's own setting; bits of a dot product depend on it
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # and the device with it
        self._run(place)
        self._ended.append(place)
        self._pass_on(place)

    def suspend(self, place: int, waiting: RoutineWait | RoutineWork) -> None:
        """Let others run until the piece, whose turn it is, can go on. Raises what `waiting` has failed with."""
        if isinstance(waiting, RoutineWork):
            self._wait(waiting)
            return
        restore = self._keep()
        self._waits[place] = waiting
        self._pass_on(place)
        restore()
        failed = self._thrown.pop(place, None)
        if failed is not None:
            raise failed

    def _pass_on(self, place: int) -> None:
        """Give the turn away; returns when `place` has it again, and for a thread that has ended at once."""
        chosen = self._choose(place) if self._waits else 0
        if chosen != place:
            if chosen in self._waits:
                self._waits[chosen] = None
            if chosen and chosen not in self._threads:
                self._start(chosen)
            else:
                self._turns[chosen].release()
            if place == 0 or place in self._waits:
                self._await_turn(place)
        elif place in self._waits:
            self._waits[place] = None

    def _start(self, place: int) -> None:
        thread = threading.Thread(target=self._run_in_thread, args=(place,), name="raypar-in-turn", daemon=True)
        self._threads[place] = thread
        thread.start()

    def _await_turn(self, place: int) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                self._turns[place].acquire()
                break
            except BaseException as error:  # Ctrl-C in the main thread, while another has the turn
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _choose(self, place: int) -> int:
        """The piece whose turn is next. `place`: the one whose turn it was, which is the last to be chosen."""
        if self._failed is not None:
            return self._choose_to_end(place)
        for each in self._after(place):
            waiting = self._waits[each]
            try:
                if waiting is None or waiting.handle.done():
                    return each
            except Exception as error:
                self._thrown[each] = error
                return each
        waits = {each: waiting for each, waiting in sorted(self._waits.items()) if waiting is not None}
        each = next((each for each, waiting in waits.items() if is_posted(waiting)), min(waits))
        try:
            self._wait(waits[each])
        except Exception as error:
            self._thrown[each] = error
        return each

    def _choose_to_end(self, place: int) -> int:
        """The piece that is told next that all are to end. Those that have not begun do not begin."""
        for each in [each for each in self._waits if each and each not in self._threads]:
            del self._waits[each]
        self._tries += 1
        if self._tries > MOST_TRIES_TO_END * len(self._works):  # each time they catch it: their threads stay
            self._waits = {each: waiting for each, waiting in self._waits.items() if each == 0}
        if not self._waits:
            return 0
        each = next(self._after(place))
        self._thrown[each] = GroupAborted("the routine was closed")
        return each

    def _after(self, place: int) -> Iterator[int]:
        """All pieces that have not ended, from the one behind `place` on."""
        count = len(self._works)
        return (each for each in itertools.chain(range(place + 1, count), range(place + 1)) if each in self._waits)


class _Piece:
    """The fiber of one piece."""

    def __init__(self, turns: _Turns[T], place: int) -> None:
        self._turns, self._place = turns, place

    def suspend(self, waiting: RoutineWait | RoutineWork) -> None:
        """See `_Turns.suspend`."""
        self._turns.suspend(self._place, waiting)
