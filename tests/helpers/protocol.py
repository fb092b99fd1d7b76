"""The whole protocol in one thread on a virtual clock: the real run machine, the real members, hashes instead of tensors.

`simulate(job, plan, faults)` runs a job; faults hit at numbered points: every yield of every worker's routine (an
instruction, a wait, a part of an adoption), every message between workers, every action of the driver. A run ends with the
state's hash and the journal's losses, or with the machine's error; anything else (nothing left to do, too much time) is a
hang and fails.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from helpers.hash_body import Handle, HashBody, Mesh, h

from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.generation_guard import GenerationGuard, StaleGeneration
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CommError, RayparError, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.pieces import subtract_pieces

Kind = Literal[
    "kill",
    "zombie",
    "stop",
    "delay",
    "duplicate",
    "late_answer",
    "kill_driver",
    "stop_driver",
    "join",
    "drain",
    "corrupt",
    "ctrl_c",
    "sleep",
    "place",
]
CALL_MS = 0.5
LOST_MS = 15.0
TICK_MS = 250.0
DRIVER_BACK_MS = 1000.0
HIRE_MS = 8.0
"""Short, so that who is hired has joined before a simulation of a few steps is over."""
STARVED_MS = 1500.0
UNHEARD_MS = 100.0
ABORTED_MS = 2000.0
"""Who has not answered an abort by then is not waited for."""
LIMIT_MS = 120_000.0


@dataclass(frozen=True)
class Fault:
    """At point `at` of the world's count (or of worker `of`'s own): what happens. `ms`: how long a stop or a delay lasts.

    zombie: stopped until it has long been given up, then it goes on as if nothing were. stop: shorter than any deadline.
    sleep: its step stands still, and pings and control calls are answered. corrupt: what the worker holds changes by itself.
    ctrl_c: people ask the run to save and end, with `ms` for what is in flight; a new driver is asked again.
    place: the cluster finds room for the group that has been asked for first, of those that have none.
    """

    at: int
    kind: Kind
    worker: int | None = None
    ms: float = 0.0


ChangeKind = Literal["kill", "zombie", "stop", "drain", "join", "kill_driver", "stop_driver"]


EVERYBODY = 1 << 20


@dataclass(frozen=True)
class Change:
    """Of the membership, `ms` after people have seen `after` steps: so many `workers` (or the driver).

    Who it is is chosen by `seed` when it happens, from those that have a seat then: neighbours by rank, and one stays.
    `EVERYBODY`: nobody does. Who holds the only copy of something is not killed or hung while there is no checkpoint, but
    leaves (drain).
    """

    after: int
    ms: float
    kind: ChangeKind
    workers: int = 1
    seed: int = 0


@dataclass
class Process:
    """One worker's process: a serial queue of calls, and control calls beside it."""

    number: int
    world: World
    alive: bool = True
    stopped_until: float = 0.0
    stopped_since: float = 0.0
    asleep_until: float = 0.0
    ready: bool = True
    placed: bool = True
    """Whether the cluster has found room for it; before that there is no process, only the demand."""
    together: tuple[int, ...] = ()
    """The workers of its placement group."""
    queue: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=deque)
    running: Any = None
    reply: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        self.body = self.world.flesh.body(self.number)
        self.member = GenerationGuard(self.number, self.body)

    def call(self, work: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        self.queue.append((work, reply))
        self.next()

    def next(self) -> None:
        while self.alive and self.running is None and self.queue:
            work, self.reply = self.queue.popleft()
            try:
                made = work()
            except Exception as error:
                self.done(error)
                continue
            if hasattr(made, "send"):
                self.running = made
                self.resume(None)
            else:
                self.done(made)

    def resume(self, failed: Exception | None) -> None:
        if not self.alive or self.running is None:
            return
        if self.asleep_until > self.world.now:
            running = self.running
            again = self.asleep_until - self.world.now
            self.world.at(again, lambda: self.resume(failed) if self.running is running else None, self)
            return
        try:
            operation = next(self.running) if failed is None else self.running.throw(failed)
        except StopIteration as end:
            self.running = None
            self.done(end.value)
            self.next()
            return
        except Exception as error:
            self.running = None
            self.done(error)
            self.next()
            return
        running = self.running
        self.world.point(self)
        if not self.alive:
            return
        if hasattr(operation, "handle"):
            handle: Any = operation.handle
            if not isinstance(handle, Handle):  # of a real transport
                self.world.polled.append((self, running, handle))
                return

            def settled() -> None:
                self.world.at(0.0, lambda: self.resume(handle.error) if self.running is running else None, self)

            if handle.settled:
                settled()
            else:
                handle.waiter = settled
        else:
            self.world.at(operation.cost_ms or 0.2, lambda: self.resume(None) if self.running is running else None, self)

    def done(self, answer: Any) -> None:
        reply = self.reply
        self.reply = None
        if reply is not None:
            reply(answer)


class Hashes:
    """What workers are made of here: the bodies, their connections, their state."""

    def __init__(self, world: World) -> None:
        self.world, self.job = world, world.job
        self.meshes: list[Mesh] = []
        self.checkpoints = {0: self.job.initial()}

    def body(self, number: int) -> Any:
        return HashBody(self.job, number, self)

    def at(self, delay_ms: float, call: Callable[[], None]) -> None:
        self.world.at(delay_ms, call)

    def message(self, mesh: Mesh, key: Any) -> list[float]:
        return self.world.message(mesh, key)

    def layout(self, plan: ParallelPlan) -> Any:
        return self.job.layout(plan)

    def connect(self, order: do.AdoptPlan, dead: set[int]) -> Mesh:
        mesh = Mesh(self, order.generation, (*order.members, *order.seatless_sources))
        self.meshes.append(mesh)
        for worker in dead & set(mesh.workers):
            mesh.close(worker, "killed")
        return mesh

    def part(self, order: do.AdoptPlan, mesh: Mesh, worker: int) -> Any:
        return order, mesh

    def share(self, order: do.AdoptPlan, worker: int) -> Any:
        """The part of a plan that differs from the present one in its shares."""
        return order, None

    def outcome(self, answer: Any) -> Any:
        return answer

    def digest(self, answer: Any, body: HashBody, step: int) -> Any:
        return body.compared.get(step + 1)

    def corrupt(self, body: HashBody) -> None:
        """A number changes by itself."""
        if body.mine:
            body.state[min(body.mine)] ^= h(self.world.points)

    def dead(self, worker: int) -> None:
        for mesh in self.meshes:
            mesh.close(worker, "killed")

    def begin_save(self, done: int) -> Any:
        return done

    def copy(self, body: HashBody, place: Any) -> dict[Any, int]:
        return dict(body.state)

    def save(self, done: int, place: Any, copies: dict[Any, int]) -> None:
        self.checkpoints[done] = copies

    def measured(self, bodies: Sequence[HashBody]) -> int:
        """What a validation finds: of each element the value that the last of its holders has, which may be wrong."""
        return h(*(value for _, value in sorted({e: body.state[e] for body in bodies for e in body.mine}.items())))

    def final(self, bodies: Sequence[HashBody]) -> int:
        state: dict[Any, int] = {}
        for body in bodies:
            for e in body.mine:
                assert state.setdefault(e, body.state[e]) == body.state[e], self.world.tell(f"holders of {e} differ")
        assert len(state) == len(self.job.initial()), self.world.tell("state is missing")
        return h(*(value for _, value in sorted(state.items())))


ENDED: Counter[tuple[str, str]] = Counter()
"""(whose arithmetic, end) -> runs with faults that have come to it, of all tests of this process."""


class World:
    """Clock, processes, connections, journal and what people have seen."""

    def __init__(
        self,
        job: Any,
        plan: ParallelPlan,
        faults: Sequence[Fault] = (),
        *,
        changes: Sequence[Change] = (),
        plans: Callable[[int, int], ParallelPlan] | None = None,
        flesh: Any = Hashes,
        tick_ms: float = TICK_MS,
        slow: Mapping[int, float] | None = None,
        nodes: Mapping[int, str] | None = None,
        misfits: Collection[int] = (),
        first: ParallelPlan | None = None,
        room: int = EVERYBODY,
        together_ms: float = 0.0,
        **policy: Any,
    ) -> None:
        """`slow`: workers that say that they compute so many times as long as the others; `nodes`: where workers are.

        `misfits`: workers whose connections suffice for no other shares.
        `first`: the plan that the run begins with, if it is smaller than `plan`; the other workers of `plan` have no place yet.
        `room`: so many workers find a place by themselves at most, for as long as they are there; further ones by `place`.
        `together_ms`: for so long reports of workers are gathered, which then come as one event, as by way of agents.
        """
        self.together_ms = together_ms
        self.slow, self.nodes, self.misfits = slow or {}, nodes or {}, misfits
        self.job, self.plan = job, plan
        self.changes = deque(sorted(changes, key=lambda change: change.after))
        """That have not come due."""
        self.plans, self.tick_ms = plans, tick_ms
        self.flesh = flesh(self)
        self.polled: list[tuple[Process, Any, Any]] = []
        self.now = 0.0
        self.agenda: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self.order = itertools.count()
        self.points = self.messages = self.actions = self.answers = 0
        self.faulted = bool(faults)
        self.faults: dict[int, list[Fault]] = {}
        self.message_faults: dict[int, list[Fault]] = {}
        self.action_faults: dict[int, list[Fault]] = {}
        self.answer_faults: dict[int, list[Fault]] = {}
        for fault in faults:
            kind = fault.kind
            table = self.faults
            if kind in ("delay", "duplicate"):
                table = self.message_faults
            elif kind == "late_answer":
                table = self.answer_faults
            elif kind in ("kill_driver", "stop_driver"):
                table = self.action_faults
            table.setdefault(fault.at, []).append(fault)
        self.first, self.room = first or plan, room
        fixed = {"workers": plan.world, "job_steps": job.steps, "elastic": True, "save_at_end": False}
        fixed["replica_size"] = max(stage.shards for stage in plan.stages)
        self.policy = RunPolicy(**(fixed | {"mirror_every": job.mirror_every} | policy))
        self.processes = [Process(n, self, ready=n < self.first.world, placed=n < self.first.world) for n in range(plan.world)]
        for group in self.first_groups():
            for number in group:
                self.processes[number].together = group
        self.given_back: list[int] = []
        """Workers that the run has given back, in order."""
        self.on_demand = set(range(0, 2 * self.policy.on_demand, 2))
        """Workers that were asked for on on-demand nodes; at first one of each two."""
        self.useful: int | None = None
        """The journal's number of workers that the planner can use."""
        self.claims: dict[int, int] = {}
        self.records: dict[int, tuple[ParallelPlan, tuple[int, ...]]] = {}
        self.journal: dict[int, Any] = {}
        self.seen: list[int] = []
        self.replayed = 0
        self.changed: list[Change] = []
        """What has happened."""
        self.validations: list[int] = []
        self.followed: dict[int, dict[int, int]] = {}
        """Generation -> steps -> what the validation after them has found, as Ray's control store has it."""
        self.story: list[str] = []
        self.over: do.Teardown | None = None
        self.ctrl_c: on.StopRequested | None = None
        self.moved = 0
        self.driver = Driver(self, 0)
        self.all_drivers = [self.driver]

    # -- clock -------------------------------------------------------------------------------------------------------------

    def at(self, delay_ms: float, call: Callable[[], None], process: Process | None = None) -> None:
        heapq.heappush(self.agenda, (self.now + delay_ms, next(self.order), process, call))

    def first_groups(self) -> list[tuple[int, ...]]:
        """The workers of the job's plan, by placement group: the shards of each replica."""
        groups: dict[Any, list[int]] = {}
        for rank, (role,) in enumerate(self.plan.roles):
            groups.setdefault((role.grid, role.replica), []).append(rank)
        return [tuple(numbers) for numbers in groups.values()]

    def run(self) -> do.Teardown:
        self.driver.begin()
        self.await_changes(0)
        while self.over is None:
            assert self.agenda, self.tell("nothing is left to do")
            now, _, process, call = heapq.heappop(self.agenda)
            if process is not None and process.stopped_until > now:
                heapq.heappush(self.agenda, (process.stopped_until, next(self.order), process, call))
                continue
            self.now = now
            assert now < LIMIT_MS, self.tell("it takes too long")
            call()
            if self.polled:
                self.poll()
        if self.faulted:
            ENDED[type(self.flesh).__name__, self.over.end] += 1
        return self.over

    def poll(self) -> None:
        """Routines that wait for an operation of a real transport."""
        waiting, self.polled = self.polled, []
        for process, running, handle in waiting:
            if not process.alive or process.running is not running:
                continue
            try:
                error = None
                if not handle.done():
                    self.polled.append((process, running, handle))
                    continue
            except Exception as failed:
                error = failed
            self.at(0.0, lambda p=process, r=running, e=error: p.resume(e) if p.running is r else None, process)

    def tell(self, what: str) -> str:
        return f"{what} at {self.now:.1f} ms\n  " + "\n  ".join([*self.story[-30:], *self.driver.machine.story])

    # -- faults ------------------------------------------------------------------------------------------------------------

    def point(self, process: Process) -> None:
        for fault in self.faults.get(self.points, ()):
            self.hit(fault, process)
        self.points += 1

    def hit(self, fault: Fault, process: Process) -> None:
        target = process if fault.worker is None else self.processes[fault.worker]
        self.story.append(f"{self.now:.1f} ms: {fault.kind} of worker {target.number}")
        match fault.kind:
            case "kill":
                self.kill(target)
            case "zombie" | "stop":
                if target.stopped_until <= self.now:
                    target.stopped_since = self.now
                target.stopped_until = max(target.stopped_until, self.now + fault.ms)
            case "sleep":
                target.asleep_until = self.now + fault.ms
            case "join":
                self.join()
            case "place":
                waiting = [p for p in self.processes if p.alive and not p.placed]
                if waiting:
                    self.place(waiting[0].together or (waiting[0].number,))
            case "corrupt":
                self.flesh.corrupt(target.body)
            case "drain":
                self.at(1.0, lambda: self.driver.post(on.DrainRequested(target.number, "preempted")))
            case "ctrl_c":
                asked = self.ctrl_c = on.StopRequested("Ctrl-C", interrupt=True, grace_s=fault.ms / 1000)
                self.at(1.0, lambda: self.driver.post(asked))

    def await_changes(self, steps: int) -> None:
        """Those that are due after so many steps."""
        while self.changes and self.changes[0].after <= steps:
            change = self.changes.popleft()
            self.at(change.ms, lambda c=change: self.change(c))

    def starve(self) -> None:
        """The run waits for workers, so that no step is seen: the next change comes all the same, and at last somebody."""
        if self.driver.machine.phase is Phase.WAITING:
            if self.changes:
                self.await_changes(self.changes[0].after)
            else:
                self.change(Change(len(self.seen), 0.0, "join"))
            self.at(STARVED_MS, self.starve)

    def change(self, change: Change) -> None:
        """See `Change`."""
        made = change
        if change.kind == "join":
            for _ in range(change.workers):
                self.join(1.0)
        elif change.kind in ("kill_driver", "stop_driver"):
            if not self.driver.alive or self.driver.stopped_until > self.now:
                return
            if change.kind == "kill_driver":
                self.kill_driver()
            else:
                self.stop_driver(MS["stop_driver"])
        else:
            victims = self.neighbours(change)
            if not victims and change.kind in ("kill", "zombie"):
                made = replace(change, kind="drain")
                victims = self.neighbours(made)
            for victim in victims:
                self.hit(Fault(0, made.kind, victim.number, MS.get(made.kind, 0.0)), victim)
            if not victims:
                return
            made = replace(made, workers=len(victims))
        self.changed.append(made)

    def neighbours(self, change: Change) -> list[Process]:
        """Whom it hits: as many as can be spared."""
        stays = self.stays()
        live = [p for p in (self.processes[w] for w in self.driver.machine.membership.members) if p in stays]
        firsts = list(range(len(live)))
        random.Random(change.seed).shuffle(firsts)
        fatal = change.kind in ("kill", "zombie")
        if fatal and change.workers == EVERYBODY and len(self.flesh.checkpoints) > 1:
            return live
        for count in range(min(change.workers, len(live) - 1), 0, -1):
            for first in firsts:
                victims = [live[(first + i) % len(live)] for i in range(count)]
                if not fatal or len(self.flesh.checkpoints) > 1 or self.can_spare(victims):
                    return victims
        return []

    def stays(self) -> list[Process]:
        """Processes that work and have not been asked to leave."""
        leaves = self.driver.machine.membership.gone | self.driver.machine.membership.leaving
        return [p for p in self.processes if p.alive and p.stopped_until <= self.now and p.number not in leaves]

    def can_spare(self, victims: Sequence[Process]) -> bool:
        """Whether the others hold all of the state after the step that was applied last, or can apply it late."""
        others = [p for p in self.stays() if p.placed and p.member.seated and p not in victims]
        done = max((p.body.applied() for p in others), default=0)
        held = [
            p.body.pieces()
            for p in others
            if p.body.applied() == done or (p.body.applied() == done - 1 and p.body.can_apply_late())
        ]
        whole = self.flesh.layout(ParallelPlan.mesh(layers=self.job.layers))[0]
        return not subtract_pieces(whole, [piece for pieces in held for piece in pieces])

    def message(self, mesh: Mesh, key: Any) -> list[float]:
        """The delays of the copies of a message that arrive."""
        delays = [0.1]
        for fault in self.message_faults.get(self.messages, ()):
            delays = [fault.ms] if fault.kind == "delay" else [0.1, 0.1 + fault.ms]
        self.messages += 1
        return delays

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        process.alive = False
        process.running = None
        self.flesh.dead(process.number)
        if process.reply is not None:
            process.done(Lost())
        while process.queue:
            _, reply = process.queue.popleft()
            reply(Lost())
        for driver in self.all_drivers:
            self.at(LOST_MS, lambda d=driver: d.lost(process.number))

    def join(self, delay_ms: float = 50.0) -> None:
        """A new process, which says that it is there when it has started, to whichever driver there is then."""
        process = Process(len(self.processes), self, ready=False)
        self.processes.append(process)
        self.start(process, delay_ms)

    def ask_for(self, numbers: tuple[int, ...]) -> None:
        """Workers that the run asks the cluster for: they come at once if there is room, else by `place`."""
        self.processes += [Process(number, self, ready=False, placed=False, together=numbers) for number in numbers]
        if sum(p.alive and p.placed for p in self.processes) + len(numbers) <= self.room:
            self.place(numbers, HIRE_MS)

    def place(self, numbers: tuple[int, ...], delay_ms: float = HIRE_MS) -> None:
        """The cluster has room for the workers of a group, whose processes start one after the other."""
        for late, number in enumerate(numbers):
            if self.processes[number].alive:
                self.processes[number].placed = True
                self.start(self.processes[number], delay_ms + 7.0 * late)

    def start(self, process: Process, delay_ms: float) -> None:
        self.driver.post(on.WorkerPlaced(process.number))

        def started() -> None:
            if process.alive:
                process.ready = True
                self.driver.post(on.WorkerJoined(process.number))

        self.at(delay_ms, started, process)

    def release(self, process: Process) -> None:
        """The run gives a worker back: its process ends, or its demand is withdrawn. Nobody is told."""
        self.given_back.append(process.number)
        if process.placed:
            self.kill(process)
        process.alive = False

    def kill_driver(self) -> None:
        """The actor is gone; Ray starts another one after a while."""
        if self.over is None and self.driver.alive:
            self.story.append(f"{self.now:.1f} ms: the driver is killed")
            self.driver.alive = False
            self.at(DRIVER_BACK_MS, self.new_driver)

    def stop_driver(self, ms: float) -> None:
        """It hangs, another one is started, then it goes on: there are two."""
        old = self.driver
        self.story.append(f"{self.now:.1f} ms: the driver stops for {ms} ms")
        old.stopped_until = self.now + ms
        self.at(min(ms / 2, DRIVER_BACK_MS), lambda: self.new_driver() if self.over is None else None)

    def new_driver(self) -> None:
        self.driver = Driver(self, len(self.all_drivers))
        self.all_drivers.append(self.driver)
        self.driver.take_over()
        if self.ctrl_c is not None:
            self.driver.post(self.ctrl_c)

    def chosen(self, generation: int, workers: int) -> ParallelPlan:
        """By default as many workers as can be used, in stages as equal as can be."""
        if self.plans is not None:
            return self.plans(generation, workers)
        layers, blocks = self.job.layers, self.job.batching.blocks
        stages, replicas = max(
            ((stages, min(workers // stages, blocks)) for stages in range(1, min(layers, workers) + 1)),
            key=lambda shape: (shape[0] * shape[1], -abs(shape[0] - 2)),
        )
        return ParallelPlan.mesh(pp=stages, dp=replicas, layers=layers)

    # -- what is left ------------------------------------------------------------------------------------------------------

    def final_hash(self) -> int:
        """Of the state that the last members hold, and of the losses that people saw."""
        assert self.seen == list(range(self.job.steps)), self.tell(f"seen {self.seen}")
        if self.policy.validates:
            due = [n for n in range(1, self.job.steps + 1) if n % self.policy.validate_every == 0 or n == self.job.steps]
            assert self.validations == due, self.tell(f"validations {self.validations}")
        bodies = [self.processes[worker].body for worker in self.driver.machine.membership.members]
        return h(self.flesh.final(bodies), *(h(self.journal[s]) for s in range(self.job.steps)))


class Lost(Exception):
    """The process died with the call."""


class Driver:
    """The shell around the machine, as `actors.driver_actor` is."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.alive, self.stopped_until = True, 0.0
        self.stall_told = False
        self.machine = RunMachine(world.policy, plan=world.plan, held_pieces=world.flesh.layout)
        self.machine.membership.nodes = dict(world.nodes)
        self.claimed = 0
        """The newest generation that this driver has claimed."""
        self.followed: dict[int, int] = {}
        self.outcomes: dict[int, Any] = {}
        self.inbox: deque[Any] = deque()
        self.copying: tuple[int, set[int]] = (0, set())
        self.handling = False
        self.gathered: dict[Any, list[Any]] = {}
        """(kind, step, generation) -> reports that come together, once their time is over."""

    def begin(self) -> None:
        self._tick()
        world, members = self.world, tuple(range(self.world.first.world))
        groups, claimed = tuple(world.first_groups()), max(world.claims, default=0)
        self.post(on.FirstWorkersPlaced(world.first, members, (), groups, tuple(sorted(world.on_demand)), claimed))
        self.post(on.WorkersReady())

    def take_over(self) -> None:
        if not self.world.records:  # nothing was begun
            self.begin()
            return
        self._tick()
        world = self.world
        generation = max(world.claims)
        plan, members = next(world.records[g] for g in sorted(world.records, reverse=True))
        alive = tuple(p.number for p in world.processes if p.alive and p.ready)
        starting = tuple(p.number for p in world.processes if p.alive and p.placed and not p.ready)
        pending = tuple(p.number for p in world.processes if p.alive and not p.placed)
        groups = tuple({p.together for p in world.processes if p.alive and p.together})
        self.outcomes = dict(world.journal)
        validated = world.validations[-1] if world.validations else None
        saved = max(world.flesh.checkpoints) or None
        hired = len(world.processes)
        self.post(
            on.DriverFailover(
                alive,
                generation,
                len(world.seen),
                plan,
                members,
                validated,
                saved,
                starting,
                pending,
                groups,
                tuple(sorted(world.on_demand)),
                useful_workers=world.useful,
                next_worker_number=hired,
            )
        )

    def _tick(self) -> None:
        if self.alive and self.machine.phase is not Phase.OVER:
            self.world.at(self.world.tick_ms, self._tick)
            now = self.world.now
            quiet = (
                p for p in self.world.processes if p.alive and p.placed and p.stopped_since + UNHEARD_MS < now < p.stopped_until
            )
            self.post(on.Tick(unheard=frozenset(p.number for p in quiet)))

    def post(self, event: Any) -> None:
        if not self.alive:
            return
        if self.stopped_until > self.world.now:
            if isinstance(event, on.Tick):
                if self.stall_told:
                    return
                self.stall_told, event = True, on.Tick(stalled_s=(self.stopped_until - self.world.now) / 1000)
            self.world.at(self.stopped_until - self.world.now, lambda: self.post(event))
            return
        self.inbox.append(event)
        if self.handling:
            return
        self.handling = True
        while self.inbox and self.alive:
            event = self.inbox.popleft()
            for decision in self.machine.handle(event, self.world.now / 1000):
                self.world.story.append(f"{self.world.now:.1f} ms, driver {self.number}: {decision.action} ({decision.reason})")
                for fault in self.world.action_faults.get(self.world.actions, ()):
                    if fault.kind == "kill_driver":
                        self.world.kill_driver()
                    else:
                        self.world.stop_driver(fault.ms)
                self.world.actions += 1
                if not self.alive:
                    break
                self.carry_out(decision.action)
        self.handling = False

    def lost(self, worker: int) -> None:
        done, waiting = self.copying
        if worker in waiting:
            self.copying = (0, set())
            self.post(on.CheckpointFailed(done, WorkerLost(f"worker {worker} died")))
        if worker in self.machine.hiring.starting:
            self.post(on.WorkerStartFailed(worker, WorkerLost(f"worker {worker} died")))
        self.post(on.CallFailed("lost", WorkerLost(f"worker {worker} died"), worker))

    def ask(self, worker: int, work: Callable[[Process], Any], reply: Callable[[Any], None]) -> None:
        """A call in the worker's queue; the answer comes back, or nothing does when the process is lost (see `lost`)."""
        process = self.world.processes[worker]

        def arrive() -> None:
            if process.alive:
                process.call(lambda: work(process), answer)
            elif worker not in self.machine.membership.gone:
                self.world.at(CALL_MS, lambda: self.lost(worker))

        def answer(value: Any) -> None:
            if not isinstance(value, Lost):
                late = sum(fault.ms for fault in self.world.answer_faults.get(self.world.answers, ()))
                self.world.answers += 1
                self.world.at(CALL_MS + late, lambda: reply(value))

        self.world.at(CALL_MS, arrive, process)

    def effect(self, work: Callable[[], Any]) -> None:
        def perform() -> None:
            if self.alive:
                event = work()
                if event is not None:
                    self.post(event)

        self.world.at(0.5, perform)

    # -- actions -------------------------------------------------------------------------------------------------------------

    def carry_out(self, action: Any) -> None:
        world, machine = self.world, self.machine
        generation = machine.membership.generation
        match action:
            case do.RunStep(step, cut):
                try:
                    rate = self.rate_of(step)
                except RayparError as error:
                    self.post(on.CallFailed("error", error))
                    return
                for worker in machine.membership.members:
                    self.ask(
                        worker,
                        lambda p: self.begin_step(p, generation, step, cut, rate),
                        lambda a, w=worker: self.stepped(w, step, generation, a),
                    )
            case do.WriteJournal(step):
                self.effect(lambda: self.journal(step))
            case do.EmitStep(step):
                self.effect(lambda: self.emit(step))
            case do.CompareReplayedStep(step, doubted):
                if doubted:
                    world.journal[step] = self.outcomes[step]
                if self.outcomes[step] != world.journal[step]:
                    self.post(on.CallFailed("error", RayparError(f"step {step} was executed again and gave something else")))
                world.replayed += 1
            case do.StartCheckpoint(done):
                self.snapshot(done)
            case do.Validate(done):
                for worker in machine.membership.members:
                    self.ask(
                        worker,
                        lambda p: p.member.validate(generation),
                        lambda a, w=worker: self.answered(a, generation, w, on.ValidationReported((w,), done, generation)),
                    )
            case do.EmitValidation(done):
                if self.follows(done):
                    self.followed[done] = world.flesh.measured([world.processes[w].body for w in machine.membership.members])
                values = dict(self.followed)
                self.effect(lambda: self.emit_validation(done, values))
            case do.ForgetValidations(done):
                self.followed = values = {at: value for at, value in self.followed.items() if at < done}
                self.effect(lambda: self.keep_followed(values))
            case do.ClaimGeneration(number):
                self.effect(lambda: self.claim(number))
            case do.FenceWorkers(number, workers):
                for worker in workers:
                    self.fence(number, worker)
            case do.ApplyKeptGradients(number, workers, step, outcome):
                for worker in workers:
                    self.ask(
                        worker,
                        lambda p: p.member.apply_kept_gradients(number, step, outcome),
                        lambda a, w=worker: self.answered(a, number, w, on.KeptGradientsApplied(number, a)),
                    )
            case do.ChoosePlan(number, workers):
                self.effect(lambda: on.PlanChosen(number, world.chosen(number, workers)))
            case do.AdoptPlan():
                self.adopt(action)
            case do.PrepareShares(number, plan):
                self.effect(lambda: on.SharesPrepared(number, plan))
            case do.AdoptShares():
                self.share_out_anew(action)
            case do.StartWorkers(workers, on_demand):
                if workers[0] < len(world.processes):  # another driver has given that name
                    for worker in workers:
                        self.post(on.WorkerStartFailed(worker, WorkerLost(f"there is a worker {worker} already")))
                else:
                    assert workers[0] == len(world.processes), world.tell(f"workers {workers} are hired")
                    world.on_demand.update(workers if on_demand else ())
                    world.ask_for(workers)
            case do.ReleaseWorkers(workers):
                for worker in workers:
                    assert worker not in machine.membership.members, world.tell(f"worker {worker} has a seat")
                    world.release(world.processes[worker])
            case do.StoreUsefulWorkers(workers):
                world.useful = workers
            case do.KillWorker(worker, _):
                process = world.processes[worker]
                late = max(0.0, process.stopped_until - world.now)  # a stopped process may go on before the kill gets through
                world.at(late + 20.0, lambda: world.kill(process))
            case do.Teardown():
                if action.end == "deposed":
                    self.alive = False
                else:
                    world.over, world.driver = action, self
            case do.RequestStacks(workers):
                self.effect(lambda: on.StacksReported(f"workers {workers} do not answer"))
            case do.WarnUser():
                if machine.phase is Phase.WAITING and world.changed:
                    world.at(STARVED_MS, world.starve)
            case do.AbortGroups(why):
                self.abort(why)
            case do.TellUser() | do.ReportFirstStepAfterRecovery() | do.ReportStraggler() | do.ReportShares():
                pass
            case _:
                raise AssertionError(action)

    def stepped(self, worker: int, step: int, generation: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.answered(answer, generation, worker, None)
        else:
            self.outcomes[step] = self.world.flesh.outcome(answer)
            digest = self.world.flesh.digest(answer, self.world.processes[worker].body, step)
            digests = {} if digest is None else {worker: digest}
            busy_s = 0.005 * self.world.slow.get(worker, 1.0)
            self.report(on.StepReported((worker,), step, 0.01, generation, digests=digests, busy_s={worker: busy_s}))

    def report(self, event: Any) -> None:
        """Post a worker's report, with those of other workers where they come together."""
        key = type(event), event.step if isinstance(event, on.StepReported) else event.done, event.generation
        if key in self.gathered:
            self.gathered[key].append(event)
            return
        gathered = self.gathered[key] = [event]

        def arrive() -> None:
            del self.gathered[key]
            workers = tuple(worker for one in gathered for worker in one.workers)
            if isinstance(event, on.StepReported):
                digests = {worker: digest for one in gathered for worker, digest in one.digests.items()}
                busy_s = {worker: busy_s for one in gathered for worker, busy_s in one.busy_s.items()}
                self.post(replace(event, workers=workers, digests=digests, busy_s=busy_s))
            else:
                self.post(replace(event, workers=workers))

        if self.world.together_ms:
            self.world.at(self.world.together_ms, arrive)
        else:
            arrive()

    def answered(self, answer: Any, generation: int, worker: int, event: Any) -> None:
        if isinstance(answer, (CommError, StaleGeneration)):
            self.post(on.CallFailed("aborted", answer, worker, generation))
        elif isinstance(answer, RayparError):
            self.post(on.CallFailed("error", answer, worker, generation))
        elif isinstance(answer, Exception):
            raise answer
        elif isinstance(event, on.ValidationReported):
            self.report(event)
        else:
            self.post(event)

    def fence(self, number: int, worker: int) -> None:
        process = self.world.processes[worker]

        def arrive() -> None:
            if not process.alive:
                self.world.at(CALL_MS, lambda: self.lost(worker))
                return
            try:
                process.member.enter_generation(number, f"generation {number} begins")
            except StaleGeneration as error:
                self.world.at(CALL_MS, lambda e=error: self.answered(e, number, worker, None))

        late = 2.0 * (worker % 2)  # beside the queue of calls nothing is ordered
        self.world.at(CALL_MS + late, arrive, process)
        self.ask(worker, lambda p: p.member.report_status(number), lambda a: self.stood(number, worker, a))

    def stood(self, number: int, worker: int, answer: Any) -> None:
        if not isinstance(answer, Exception):
            self.outcomes.update({step: self.world.flesh.outcome(o) for step, o in answer.vote_results.items()})
            answer = on.WorkerStatusReported(number, answer)
        self.answered(answer, number, worker, answer)

    def abort(self, why: str) -> None:
        """All leave what they do; where they stand then is asked behind it."""
        world, members = self.world, self.machine.membership.members
        stand: dict[int, int | None] = {}

        def stands(worker: int, done: Any) -> None:
            if worker not in stand:
                stand[worker] = done if isinstance(done, int) else None
                if len(stand) == len(members):
                    self.post(on.GroupsAborted(tuple(stand[w] for w in members)))

        for worker in members:
            process = world.processes[worker]
            world.at(CALL_MS, lambda p=process: p.body.abort(why) if p.alive else None, process)
            self.ask(worker, lambda p: p.body.applied(), lambda a, w=worker: stands(w, a))
            world.at(ABORTED_MS, lambda w=worker: stands(w, None))

    def adopt(self, order: do.AdoptPlan) -> None:
        world = self.world
        world.records[order.generation] = (order.plan, order.members)
        mesh = world.flesh.connect(order, {p.number for p in world.processes if not p.alive})
        world.moved += sum(move.piece.size for move in order.moves)
        for worker in (*order.members, *order.seatless_sources):
            part = world.flesh.part(order, mesh, worker)
            self.ask(
                worker,
                lambda p, part=part: p.member.adopt(order.generation, part),
                lambda a, w=worker: self.answered(
                    a, order.generation, w, on.PlanAdopted(w, order.generation, self.not_kept(w))
                ),
            )

    def share_out_anew(self, action: do.AdoptShares) -> None:
        world, members = self.world, self.machine.membership.members
        world.records[action.generation] = (action.plan, members)
        order = do.AdoptPlan(action.generation, action.plan, members, (), action.done, ())
        for worker in members:
            part = world.flesh.share(order, worker)
            self.ask(
                worker,
                lambda p, part=part: p.member.share_out_anew(action.generation, part),
                lambda a, w=worker: self.answered(a, action.generation, w, on.SharesAdopted(w, action.generation, a is True)),
            )

    def not_kept(self, worker: int) -> str:
        """What a worker says of optimizer state that it could not take over."""
        described = getattr(self.world.processes[worker].body, "adopt_description", None)
        return described["not_kept"] if described is not None else ""

    def journal(self, step: int) -> Any:
        """Compare and set: what is there already is the same, or the protocol is wrong, or a former driver's state was."""
        world = self.world
        same = world.journal.setdefault(step, self.outcomes[step]) == self.outcomes[step]
        assert same or any("silent corruption" in line for line in world.story), world.tell(f"two journals of {step}")
        return on.StepJournalled(step)

    def emit(self, step: int) -> Any:
        if self.world.seen and self.world.seen[-1] >= step:
            return on.StepEmitted(step)  # another driver was first
        self.world.seen.append(step)
        self.world.await_changes(len(self.world.seen))
        return on.StepEmitted(step)

    def follows(self, done: int) -> bool:
        """Whether the learning rates follow the validation after so many steps, if there is one."""
        policy = self.world.policy
        return policy.rates_follow_validations and done > 0 and done % policy.validate_every == 0

    def rate_of(self, step: int) -> int | None:
        """What the learning rate of a step follows, as `StepReports.validated_before` and `SchedulerRates` have it."""
        last = step - step % (self.world.policy.validate_every or 1)
        if self.follows(last) and last not in self.followed:
            raise RayparError(f"the value after {last} steps was lost with a driver")
        if not self.world.policy.rates_follow_validations:
            return None
        return h(*(value for done, value in sorted(self.followed.items()) if done <= step))

    def begin_step(self, process: Process, generation: int, step: int, cut: bool, rate: int | None) -> Any:
        process.member.admit(generation)
        if rate is not None:
            process.body.rate = rate
        return process.member.step(generation, step, cut)

    def claim(self, number: int) -> Any:
        """A driver that takes over has what was validated until then, as in `GenerationChange`."""
        ok = self.world.claims.setdefault(number, self.number) == self.number
        if ok and not self.claimed and self.world.followed:
            self.followed = dict(self.world.followed[max(self.world.followed)])
        self.claimed = number if ok else self.claimed
        return on.GenerationClaimed(number, ok)

    def keep_followed(self, values: dict[int, int]) -> Any:
        self.world.followed[self.claimed] = values
        return on.Tick()

    def emit_validation(self, done: int, values: dict[int, int]) -> Any:
        self.keep_followed(values)
        if self.world.claims.get(self.claimed + 1, self.number) != self.number:
            return on.GenerationClaimed(self.machine.membership.generation, False)
        if done not in self.world.validations:
            self.world.validations.append(done)
        return on.ValidationEmitted(done)

    def snapshot(self, done: int) -> None:
        world, machine = self.world, self.machine
        waiting, copies, generation = set(machine.membership.members), {}, machine.membership.generation
        self.copying = (done, waiting)
        place = world.flesh.begin_save(done)

        def copied(worker: int, answer: Any) -> None:
            if self.copying[1] is not waiting:
                return
            if isinstance(answer, RayparError):
                self.copying = (0, set())
                self.post(on.CheckpointFailed(done, answer))
                return
            copies.update(answer)
            waiting.discard(worker)
            if not waiting:
                self.post(on.AllWorkersCopiedState(done))
                self.effect(lambda: self.saved(done, place, copies))

        for worker in machine.membership.members:
            self.ask(
                worker,
                lambda p: p.member.save(generation, done, lambda: world.flesh.copy(p.body, place)),
                lambda a, w=worker: copied(w, a),
            )

    def saved(self, done: int, place: Any, copies: dict[Any, Any]) -> Any:
        self.world.flesh.save(done, place, copies)
        return on.CheckpointSaved(done)


def simulate(job: Any, plan: ParallelPlan, faults: Sequence[Fault] = (), **policy: Any) -> tuple[World, int | None]:
    """Runs a job to its end; (the world, the final hash or None when it ended with an error)."""
    world = World(job, plan, faults, **policy)
    over = world.run()
    return world, world.final_hash() if over.end == "done" else None


MS: dict[Kind, float] = {
    "zombie": 4000.0,
    "stop": 20.0,
    "delay": 30.0,
    "duplicate": 3.0,
    "late_answer": 40.0,
    "stop_driver": 3000.0,
    "ctrl_c": 5.0,
    "sleep": 25_000.0,
}
KINDS: tuple[Kind, ...] = (
    "kill",
    "zombie",
    "stop",
    "delay",
    "duplicate",
    "late_answer",
    "kill_driver",
    "stop_driver",
    "join",
    "drain",
)


def places(world: World, kind: Kind) -> int:
    """How many places a finished run had for this kind of fault."""
    if kind in ("delay", "duplicate"):
        return world.messages
    if kind == "late_answer":
        return world.answers
    return world.actions if kind.endswith("driver") else world.points


def single_faults(world: World, kinds: Sequence[Kind] = KINDS, start: float = 0.0) -> list[Fault]:
    """Every fault at every place of a finished run, from that part of it on."""
    return [
        Fault(at, kind, ms=MS.get(kind, 0.0))
        for kind in kinds
        for at in range(int(start * places(world, kind)), places(world, kind))
    ]


def random_faults(seed: int, count: int, world: World, *, workers: int = 0, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """A seeded history for a run like `world`, and for what its recoveries add. With `workers`, half of the faults hit one of
    these instead of the worker that is at the place."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        kind = dice.choice(list(kinds))
        target = dice.randrange(workers) if workers and dice.random() < 0.5 else None
        found.append(Fault(dice.randrange(int(1.4 * places(world, kind))), kind, target, MS.get(kind, 0.0)))
    return found
