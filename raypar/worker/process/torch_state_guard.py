"""Guards the global PyTorch state that decides results (grad mode, default dtype, threads, ...) against users' code.

Which code ran earlier in a process depends on the plan, so results must not depend on state that an earlier call left changed.
Every call of users' code therefore begins in the same state: after each call the state is compared and restored, and a line
tells the user what was left changed, and by what. What cannot be restored (tensors made in inference mode) is an error.
Generators are not compared: every call begins as if they had been seeded (`worker.process.seeded_calls`,
`worker.data.sample_reader.SampleReader`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from raypar.comm.blocking_code_as_routine import KeepGenerators
from raypar.errors import UserCodeError
from raypar.torch_compat import process_state
from raypar.torch_compat.process_state import float32_precision, saved_tensors_hooks
from raypar.worker.process.environment_and_signals_guard import EnvironmentGuard
from raypar.worker.process.seed_generators import HostGenerators

R = TypeVar("R")

_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("mkldnn", "cuda") for operation in ("all", "matmul", "conv", "rnn")),
)
_PARALLEL_GRAIN = 32768
"""Elements below which PyTorch runs an elementwise operation in one thread."""

_SMALLEST = 1e-310
"""A denormal double: times 1 it is 0 if the processor flushes denormal numbers."""


class AutocastState(NamedTuple):
    """The state of `torch.autocast` in a thread."""

    enabled: bool
    """Whether it is on for any kind of device."""
    kinds: tuple[str, ...]
    """Which of `_AUTOCAST_KINDS` it is on for."""
    cpu_dtype: torch.dtype
    """The dtype to which it casts on the CPU."""
    caches: bool
    """Whether casts of weights are kept until the outermost `autocast` is left."""
    depth: int
    """Number of nested `autocast` contexts. One that is entered in a backward pass and not left is switched off when the pass
    ends, but still counted. Then no `autocast` is the outermost one any more, and cached casts outlive their weights."""


_AUTOCAST_KINDS = ("cpu", "cuda")


def _read_autocast_depth() -> int:
    torch.autocast_increment_nesting()  # PyTorch tells the depth to whoever changes it
    return torch.autocast_decrement_nesting()


def read_autocast_state() -> AutocastState:
    """The present `AutocastState` of this thread."""
    enabled = process_state.is_any_autocast_enabled()
    kinds = tuple([kind for kind in _AUTOCAST_KINDS if torch.is_autocast_enabled(kind)]) if enabled else ()
    caches, depth = torch.is_autocast_cache_enabled(), _read_autocast_depth()
    return AutocastState(enabled, kinds, torch.get_autocast_dtype("cpu"), caches, depth)


class GlobalTorchState(NamedTuple):
    """The global state on which PyTorch's results depend, besides generators.

    Fields that code tends to switch in mid-run are compared after every call of users' code (see `read_per_call_state`). The
    rest are compared once a step, and after every call of a worker's first step: reading all of them takes 30 us with cold
    caches.
    """

    inference: bool
    """`torch.inference_mode`; of the thread. Tensors made in it can never be trained on."""
    grad: bool
    """`torch.set_grad_enabled`; of the thread."""
    autocast: AutocastState
    """`torch.autocast`; of the thread."""
    default_dtype: torch.dtype
    """`torch.set_default_dtype`; of the process."""
    threads: int
    """`torch.set_num_threads`; of the thread, inherited by threads it has not met. Decides the order of sums."""
    function_modes: int
    """How many `TorchFunctionMode`s are entered: `torch.set_default_device`, `with torch.device(...)`; of the thread."""
    dispatch_modes: int
    """How many `TorchDispatchMode`s are entered; of the thread."""
    saved_tensors_hooks: bool
    """Whether `torch.autograd.graph.saved_tensors_hooks` are entered; of the thread."""
    anomaly: tuple[bool, bool]
    """`torch.autograd.set_detect_anomaly`, and whether it refuses NaN; of the process."""
    deterministic: process_state.Flags
    """`torch.use_deterministic_algorithms`, its `warn_only`, whether memory is filled; of the process."""
    flush_denormal: bool
    """`torch.set_flush_denormal`; of the thread. Threads that OpenMP starts meanwhile keep it for ever."""
    precisions: tuple[str, ...]
    """`torch.set_float32_matmul_precision` and `fp32_precision` of the backends (`_PRECISIONS`); of the process.

    "none" (never set) computes as "ieee" does, so both are recorded as "none".
    """
    mkldnn: process_state.Flags
    """`torch.backends.mkldnn.enabled` and `deterministic`; of the process."""
    cudnn: process_state.Flags
    """`torch.backends.cudnn.enabled`, `benchmark` and `deterministic`; of the process."""
    attention: process_state.Flags
    """`torch.backends.cuda.enable_flash_sdp` and its like (efficient, math, cuDNN); of the process, on CPUs too."""


def read_global_torch_state() -> GlobalTorchState:
    """The present `GlobalTorchState` of this thread and process."""
    return GlobalTorchState(
        inference=torch.is_inference_mode_enabled(),
        grad=torch.is_grad_enabled(),
        autocast=read_autocast_state(),
        threads=torch.get_num_threads(),
        function_modes=process_state.count_function_modes(),
        dispatch_modes=process_state.count_dispatch_modes(),
        saved_tensors_hooks=saved_tensors_hooks(True) is not None,
        flush_denormal=_SMALLEST * 1.0 == 0.0,
        **_read_settings_of_process(),
    )


def _read_settings_of_process() -> dict[str, Any]:
    """The fields of `GlobalTorchState` that all threads of a process share, as they are now."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": process_state.deterministic_flags(),
        "precisions": tuple(["none" if (found := float32_precision(*place)) == "ieee" else found for place in _PRECISIONS]),
        "mkldnn": process_state.mkldnn_flags(),
        "cudnn": process_state.cudnn_flags(),
        "attention": process_state.attention_flags(),
    }


PerCallState = tuple[Hashable, ...]
"""Some fields of `GlobalTorchState`, as `read_per_call_state` reads them."""


def _make_reader() -> Callable[[], PerCallState]:
    """`read_per_call_state`. It holds the functions that it calls: with cold caches it takes longer to find them, one after
    the other, than to call them."""
    inference, grad, dtype, threads = (
        torch.is_inference_mode_enabled,
        torch.is_grad_enabled,
        torch.get_default_dtype,
        torch.get_num_threads,
    )
    autocast, enter_autocast, leave_autocast = (
        process_state.is_any_autocast_enabled,
        torch.autocast_increment_nesting,
        torch.autocast_decrement_nesting,
    )
    function_modes, dispatch_modes = process_state.count_function_modes, process_state.count_dispatch_modes
    anomaly, deterministic, hooks = torch.is_anomaly_enabled, process_state.is_deterministic, saved_tensors_hooks

    def read() -> PerCallState:
        enter_autocast()  # PyTorch tells the depth to whoever changes it
        return (
            inference(),
            grad(),
            autocast(),
            leave_autocast(),
            dtype(),
            threads(),
            function_modes(),
            dispatch_modes(),
            anomaly(),
            deterministic(),
            hooks(True) is not None,
            _SMALLEST * 1.0 == 0.0,
        )

    return read


read_per_call_state = _make_reader()
"""Read the part of the state that is compared after every call."""


def select_per_call_state(state: GlobalTorchState) -> PerCallState:
    """The fields of a state that `read_per_call_state` would return."""
    return (
        *(state.inference, state.grad, state.autocast.enabled, state.autocast.depth, state.default_dtype, state.threads),
        *(state.function_modes, state.dispatch_modes, state.anomaly[0], state.deterministic[0]),
        *(state.saved_tensors_hooks, state.flush_denormal),
    )


def state_with_default_contexts() -> GlobalTorchState:
    """The state now, with contexts and thread modes at PyTorch's defaults.

    Flags of backends stay: whoever runs a plan in its own process may have chosen them.
    """
    return read_global_torch_state()._replace(
        inference=False,
        grad=True,
        default_dtype=torch.float32,
        function_modes=0,
        dispatch_modes=0,
        saved_tensors_hooks=False,
        anomaly=(False, True),
        flush_denormal=False,
    )


DEFAULT_TORCH_STATE = state_with_default_contexts()
"""The state when this module was imported: that of a fresh process, if no users' code has run before."""


# -- restoring ---------------------------------------------------------------------------------------------------------------


def _set_autocast(value: AutocastState) -> None:
    """Restore the state of `autocast`, and clear its cache of cast weights."""
    for kind in _AUTOCAST_KINDS:
        torch.set_autocast_enabled(kind, kind in value.kinds)
    torch.set_autocast_dtype("cpu", value.cpu_dtype)
    torch.set_autocast_cache_enabled(value.caches)
    while _read_autocast_depth() > value.depth:
        torch.autocast_decrement_nesting()
    while _read_autocast_depth() < value.depth:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _set_function_modes(value: int) -> None:
    torch.set_default_device(None)
    process_state.leave_function_modes(value)


def _set_saved_tensors_hooks(value: bool) -> None:
    assert not value, "no hooks are entered between calls"
    process_state.pop_all_saved_tensors_hooks()


_OLDER_PRECISIONS = {"tf32": "high", "bf16": "medium"}
"""Precision of a product of matrices -> what `torch.set_float32_matmul_precision` calls it; all others are "highest"."""


def _set_precisions(value: tuple[str, ...]) -> None:
    older = _OLDER_PRECISIONS.get(value[_PRECISIONS.index(("mkldnn", "matmul"))], "highest")
    torch.set_float32_matmul_precision(older)  # also behind the older API, which the setters below do not reach
    for place, precision in zip(_PRECISIONS, value, strict=True):
        process_state.set_float32_precision(*place, precision)


@dataclass(frozen=True)
class RestorableSetting:
    """How to restore one field of `GlobalTorchState`, and how messages speak of it."""

    restore: Callable[[Any], Any]
    """Sets the field to the value that is expected."""
    changing_call: str
    """The user's call that changes the field, for messages; `{}` stands for the value found."""
    cure: str
    """What the user can do instead, for messages."""


_FOR_ALL = "such settings hold for all layers, whichever worker has them; leave it out"

SETTINGS: Mapping[str, RestorableSetting] = {
    "inference": RestorableSetting(
        process_state.set_inference, "torch.inference_mode()", "enter it by `with torch.inference_mode():`"
    ),
    "grad": RestorableSetting(
        torch.set_grad_enabled,
        "torch.set_grad_enabled({})",
        "use it as a context manager: `with torch.no_grad():` around what needs no gradient",
    ),
    "autocast": RestorableSetting(_set_autocast, "torch.autocast", "enter it by `with torch.autocast(...):`"),
    "default_dtype": RestorableSetting(
        torch.set_default_dtype,
        "torch.set_default_dtype({})",
        "give dtype=... to what makes tensors; the model's own is the job's `dtype`",
    ),
    "threads": RestorableSetting(torch.set_num_threads, "torch.set_num_threads({})", "set the job's `threads`"),
    "function_modes": RestorableSetting(
        _set_function_modes,
        "torch.set_default_device or `with torch.device(...)`",
        "give device=... to what makes tensors, or use `with torch.device(...):`",
    ),
    "dispatch_modes": RestorableSetting(process_state.leave_dispatch_modes, "a TorchDispatchMode", "enter it by `with`"),
    "saved_tensors_hooks": RestorableSetting(
        _set_saved_tensors_hooks, "torch.autograd.graph.saved_tensors_hooks", "enter them by `with saved_tensors_hooks(...):`"
    ),
    "anomaly": RestorableSetting(
        lambda value: torch.set_anomaly_enabled(*value),
        "torch.autograd.set_detect_anomaly (enabled, check_nan) = {}",
        "use `with torch.autograd.detect_anomaly():`, in `raypar debug`",
    ),
    "deterministic": RestorableSetting(
        process_state.set_deterministic, "torch.use_deterministic_algorithms (on, warn_only, fill memory) = {}", _FOR_ALL
    ),
    "flush_denormal": RestorableSetting(torch.set_flush_denormal, "torch.set_flush_denormal({})", _FOR_ALL),
    "precisions": RestorableSetting(
        _set_precisions,
        "torch.set_float32_matmul_precision or a backend's fp32_precision or allow_tf32",
        _FOR_ALL,
    ),
    "mkldnn": RestorableSetting(
        process_state.set_mkldnn, "torch.backends.mkldnn (enabled, deterministic) = {}", "use `with mkldnn.flags(...):`"
    ),
    "cudnn": RestorableSetting(
        process_state.set_cudnn, "torch.backends.cudnn (enabled, benchmark, deterministic) = {}", "use `with cudnn.flags(...):`"
    ),
    "attention": RestorableSetting(
        process_state.set_attention,
        "torch.backends.cuda.enable_..._sdp (flash, efficient, math, cudnn) = {}",
        "use `with torch.nn.attention.sdpa_kernel(...):`",
    ),
}
"""By field of `GlobalTorchState`, in its order, in which they are restored."""


_CONTEXTS = ("inference", "function_modes", "dispatch_modes", "saved_tensors_hooks")
"""Fields that only leaving a context can restore."""


@contextlib.contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore on exit the settings that were found on entry; of contexts that are entered, the default device and grad mode."""
    before, device = read_global_torch_state(), torch.get_default_device()
    try:
        yield
    finally:
        now = read_global_torch_state()
        for name in GlobalTorchState._fields:
            if getattr(now, name) != getattr(before, name) and name not in _CONTEXTS:
                SETTINGS[name].restore(getattr(before, name))
        if torch.get_default_device() != device:
            torch.set_default_device(device)


# -- the guard ---------------------------------------------------------------------------------------------------------------


class ExpectedTorchState(NamedTuple):
    """The state that a guard expects after calls of users' code."""

    training: GlobalTorchState
    """In training."""
    evaluating: GlobalTorchState
    """In validation: the same without gradients."""
    quick: tuple[PerCallState, PerCallState]
    """The expected `read_per_call_state`: in training, and in validation."""

    @staticmethod
    def of(training: GlobalTorchState) -> ExpectedTorchState:
        """The expected states, made from the one in training."""
        evaluating = training._replace(grad=False)
        return ExpectedTorchState(training, evaluating, (select_per_call_state(training), select_per_call_state(evaluating)))


class _OfThread(threading.local):
    """What a guard keeps for each thread."""

    has_team = False
    """Whether its OpenMP threads have been started."""
    accepted: ExpectedTorchState | None = None
    """What is expected inside contexts that raypar has entered in it; None outside of them."""
    compares_at_end = False
    """Whether it is inside `compare_once`, so that `check` compares nothing."""


class TorchStateGuard(EnvironmentGuard):
    """Compares the state of the process after calls of users' code, restores it, and keeps a line for the user.

    There is one for each worker (or data process). One thread uses it at a time. At the next step that may be another thread,
    which `establish` puts into the expected state. Workers that live in one process share one, and take turns inside layers.
    """

    compare_everything: bool
    """Whether the whole state is compared after each call: in the first step of a plan that brings its worker users' code which
    it has not run yet, and after a step that left something changed."""
    _run_with_checks: set[Hashable]
    """What `compare_once` has run with all checks, as its `code` names it."""
    _changes: int
    """How many times something that was left changed has been set back."""
    _expected: ExpectedTorchState
    """What is expected where no contexts are accepted."""
    _of_thread: _OfThread
    """What is kept for the thread that asks."""
    _with_autocast: tuple[ExpectedTorchState, AutocastState, ExpectedTorchState] | None
    """What was expected outside of the last `torch.autocast` that was accepted, its state, and what was expected inside: most
    are alike."""

    def __init__(self, threads: int, base: GlobalTorchState | None = None) -> None:
        """`threads`: the job's. `base`: the expected state; by default the present one, so make the guard before users' code is
        imported."""
        super().__init__()
        off = DEFAULT_TORCH_STATE.autocast._replace(enabled=False, kinds=(), depth=0)
        self._expected = ExpectedTorchState.of((base or state_with_default_contexts())._replace(threads=threads, autocast=off))
        self.compare_everything, self._run_with_checks, self._changes = False, set(), 0
        self._of_thread, self._with_autocast = _OfThread(), None
        self.enter_thread()

    def accept(self) -> None:
        """Expect the present state from now on: raypar itself has changed it."""
        self._expected = ExpectedTorchState.of(read_global_torch_state())
        self.accept_environment()

    def _expected_here(self) -> ExpectedTorchState:
        """What is expected in this thread now."""
        return self._of_thread.accepted or self._expected

    def accepting_contexts(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the present state is expected, with the contexts that raypar itself has entered in this thread."""
        return self._expecting(read_global_torch_state())

    def accept_autocast(self) -> ExpectedTorchState | None:
        """Expect this thread's present autocast, in the place of the one expected so far, until `expect_again` gets what this
        returns. As `accepting_contexts`, which is not called for every layer."""
        before, state = self._of_thread.accepted, read_autocast_state()
        outside = before or self._expected
        known = self._with_autocast
        if known is None or known[0] is not outside or known[1] != state:
            inside = ExpectedTorchState.of(outside.training._replace(autocast=state))
            self._with_autocast = known = outside, state, inside
        self._of_thread.accepted = known[2]
        return before

    def expect_again(self, accepted: ExpectedTorchState | None) -> None:
        """Expect what was expected before `accept_autocast`, which has returned it."""
        self._of_thread.accepted = accepted

    @contextlib.contextmanager
    def _expecting(self, training: GlobalTorchState) -> Iterator[None]:
        before = self._of_thread.accepted
        self._of_thread.accepted = ExpectedTorchState.of(training)
        try:
            yield
        finally:
            self._of_thread.accepted = before

    def enter_thread(self) -> None:
        """Set this thread's number of threads, and start its OpenMP threads before users' code changes any setting.

        OpenMP threads keep the floating-point mode of the moment they start for ever; no call could restore it.
        """
        expected = self._expected.training
        threads = expected.threads
        torch.set_num_threads(threads)
        if threads > 1 and not self._of_thread.has_team:
            self._of_thread.has_team = True
            torch.set_flush_denormal(expected.flush_denormal)
            torch.zeros(threads * _PARALLEL_GRAIN, dtype=torch.int8, device="cpu").add_(1)

    def establish(self, since: str = "code that runs between steps (a thread of the job's own?)") -> None:
        """Put this thread into the expected state, before a step or a validation pass. `since`: what to blame for changes."""
        self.enter_thread()
        self.check(since)

    def check(self, caller: str, *, evaluating: bool = False, compare_everything: bool = False) -> tuple[str, ...]:
        """Restore what a call of users' code has left changed; returns the names of the changed fields. `compare_everything`:
        compare all of `GlobalTorchState`.

        Raises `UserCodeError` for inference mode: what was made in it cannot be trained on.
        """
        here = self._of_thread
        if here.compares_at_end:
            return ()
        expected = here.accepted or self._expected
        if not (compare_everything or self.compare_everything) and read_per_call_state() == expected.quick[evaluating]:
            return ()
        left = self._restore(caller, read_global_torch_state(), expected.evaluating if evaluating else expected.training)
        if self.compare_everything:
            self.check_environment(caller)
        return left

    def compare_once(
        self,
        calls: Callable[[], R],
        callers: str,
        code: Hashable,
        *,
        evaluating: bool = False,
        generators: HostGenerators | None = None,
    ) -> R:
        """What `calls` returns, which calls users' code several times, each time with a `check`, and can be run again.

        The checks would take longer than the rest of raypar's work between the calls. So state is compared once, after `calls`:
        if it was left changed, it is set back, and `calls` is run again with all its checks, which name who changes it. The
        checks are made at once after any change, where all state is compared anyway, and the first time that `code` is run: a
        call may undo what one before it has left, which a look at the end would not see. `callers`: what to blame for a change
        that is not made again; `generators`: from which `calls` is not to draw: they are asked at the end, too, and if they
        have moved, `calls` is run again. Raises what `calls` and `check` raise.
        """
        here = self._of_thread
        if self.compare_everything or self._changes or here.compares_at_end or code not in self._run_with_checks:
            found = calls()
            self._run_with_checks.add(code)
            return found
        expected = here.accepted or self._expected

        def is_as_before() -> bool:
            same = read_per_call_state() == expected.quick[evaluating]
            return same and (generators is None or generators.are_as_seeded())

        here.compares_at_end = True
        if generators is not None:
            generators.seed_if_moved()
            generators.asked_at_end = True
        try:
            found = calls()
            if is_as_before():
                return found
        except Exception:  # also of raypar's own code between the calls, as of versions of tensors made in inference mode
            if is_as_before():
                raise
        finally:
            here.compares_at_end = False
            if generators is not None:
                generators.asked_at_end = False
        left = read_global_torch_state()
        names = self._set_back(left, expected.evaluating if evaluating else expected.training)
        before = self._changes
        found = calls()
        if names and self._changes == before:
            self._changes += 1
            self._tell(callers, left, names)
        return found

    def keep_in_turn(self, keep_generators: KeepGenerators) -> Callable[[], None]:
        """For code that lets other code run, in the middle of its call: keeps the generators by `keep_generators`, and sets the
        settings of the process to the expected ones; returns what sets all of it as it is now, for the code to go on."""
        base, set_generators = (self._of_thread.accepted or self._expected).training, keep_generators()
        changed = [(name, value) for name, value in _read_settings_of_process().items() if value != getattr(base, name)]
        for name, _ in changed:
            SETTINGS[name].restore(getattr(base, name))

        def set_again() -> None:
            set_generators()
            for name, value in changed:
                SETTINGS[name].restore(value)

        return set_again

    def check_all(self, callers: str) -> None:
        """Compare the whole state, once a step, before the step's results are used. `callers`: all users' code called since.

        Raises `UserCodeError` for a change that `check` did not see: later calls have computed with it.
        """
        found = read_global_torch_state()
        left = self._restore(callers, found, self._expected.training)
        if left:
            calls = " and ".join(SETTINGS[name].changing_call.format(getattr(found, name)) for name in left)
            raise UserCodeError(
                f"{callers} left {calls} behind: what came after that has computed with it",
                cure=SETTINGS[left[0]].cure,
            )
        self.compare_everything = not self.check_environment(callers)

    @contextlib.contextmanager
    def watching(self, caller: str) -> Iterator[None]:
        """Context that restores on exit the state found on entry; for users' code that runs once (model function, imports,
        ...)."""
        before = read_global_torch_state()
        with super().watching(caller):
            yield
            self._restore(caller, read_global_torch_state(), before)

    def _restore(self, caller: str, found: GlobalTorchState, wanted: GlobalTorchState) -> tuple[str, ...]:
        """Restore the fields in which `found` differs from `wanted`; returns the names. Raises `UserCodeError` if it fails."""
        if found == wanted:
            return ()
        self._changes += 1
        left = self._set_back(found, wanted)
        if "inference" in left:
            raise UserCodeError(
                f"{caller} entered torch.inference_mode() and did not leave it: what was made in it cannot be trained on",
                cure=SETTINGS["inference"].cure,
            )
        now = read_global_torch_state()
        still = [name for name in left if getattr(now, name) != getattr(wanted, name)]
        if still:
            calls = " and ".join(SETTINGS[name].changing_call.format(getattr(found, name)) for name in still)
            raise UserCodeError(f"{caller} left {calls}, which cannot be set back", cure=SETTINGS[still[0]].cure)
        self._tell(caller, found, left)
        return left

    @staticmethod
    def _set_back(found: GlobalTorchState, wanted: GlobalTorchState) -> tuple[str, ...]:
        """Restore the fields in which `found` differs from `wanted`, where that is possible; returns the names."""
        left = [name for name in GlobalTorchState._fields if getattr(found, name) != getattr(wanted, name)]
        if "inference" in left and "grad" in left:
            left.remove("grad")  # inference mode switches it off itself
        for name in left:
            SETTINGS[name].restore(getattr(wanted, name))
        torch.set_grad_enabled(wanted.grad)
        return tuple(left)

    def _tell(self, caller: str, found: GlobalTorchState, left: Sequence[str]) -> None:
        """Keep a line about each of the fields `left` that `caller` has left as in `found`."""
        for name in left:
            setting = SETTINGS[name]
            self.tell(name, caller, setting.changing_call.format(getattr(found, name)), setting.cure)
