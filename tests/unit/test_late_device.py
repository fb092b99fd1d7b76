"""The late device (`helpers.late_device`) orders work as CUDA may, and no more: what would be a race on a GPU is seen."""

import pytest
import torch
from helpers import pretend
from helpers.late_device import Deadlock, RaceFound, World

from raypar.comm.routine import RoutineWait

pytestmark = pretend.NEEDED
SEEDS = range(40)


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend.differentiable():
        yield pretend.device()


def outcomes(program, seeds=SEEDS):
    """What the program's seeds give."""
    found = set()
    for seed in seeds:
        with World(seed, 1) as world:
            found.add(program(world, world.devices[0]))
    return found


def on_gpu(value, numel=5):
    return torch.full((numel,), value, device=pretend.device())


def test_numbers_are_those_of_the_cpu_when_the_host_reads_them():
    def program(world, device):
        torch.manual_seed(1)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(3, 2))
        x = torch.randn(6, 4)
        if device is not None:
            layer, x = layer.to(pretend.device()), x.to(pretend.device())
        loss = torch.nn.functional.cross_entropy(layer(x), torch.tensor([0, 1, 1, 0, 1, 0], device=x.device))
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(list(layer.parameters()), [p.grad for p in layer.parameters()], alpha=-0.1)
        return tuple(p.detach().cpu().numpy().tobytes() for p in layer.parameters()), loss.item()

    assert outcomes(program, range(5)) == {program(None, None)}


def test_work_is_done_after_the_call_and_in_the_order_of_its_stream():
    with World(0, 1) as world:
        tensor = on_gpu(1.0)
        tensor.mul_(3).add_(1)
        assert bool(tensor.raw.isnan().all())
        world.drain()
        assert tensor.raw.tolist() == [4.0] * 5


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_reads_too_early_under_some_seed(waits):
    def program(world, device):
        stream, found = device.stream(), []
        tensor = on_gpu(1.0).mul_(2)
        if waits:
            stream.wait_event(device.record_event())
        stream.run(lambda: found.append(tensor * 3))
        device.default.wait_stream(stream)
        return str(found[0].tolist()[0])

    assert (outcomes(program) == {"6.0"}) == waits


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_reused_at_once_in_its_stream_and_elsewhere_only_after_record_stream(recorded):
    def program(world, device):
        stream, found = device.stream(), []
        tensor = on_gpu(1.0)
        place = tensor.data_ptr()
        stream.wait_event(device.record_event())
        with stream.current():
            found.append(tensor * 3)
        if recorded:
            tensor.record_stream(stream)
        del tensor
        other = on_gpu(7.0)
        assert (other.data_ptr() == place) != recorded
        device.default.wait_stream(stream)
        del other
        read = found[0].tolist()[0]
        again = on_gpu(7.0)
        assert again.data_ptr() == place, "once the stream is seen to be done"
        return str(read)

    found = outcomes(program)
    assert (found == {"3.0"}) if recorded else (len(found) > 1)


def test_legal_orders_differ_by_seed_and_one_seed_gives_one_order():
    def program(world, device):
        order, streams = [], [device.stream() for _ in range(3)]
        for stream in streams:
            for _ in range(3):
                tensor = on_gpu(0.0)
                stream.wait_event(device.record_event())
                with stream.current():
                    tensor.add_(1)
                stream.queue[-1]._work = lambda number=stream.cuda_stream: order.append(number)
        world.drain()
        return tuple(order)

    assert len(outcomes(program)) > 20
    assert outcomes(program, [3]) == outcomes(program, [3])


def test_pytorchs_own_sanitizer_names_what_nothing_puts_in_order():
    for waits in (True, False):
        with World(0, 1, sanitize=True) as world:
            device = world.devices[0]
            tensor, stream = on_gpu(1.0), device.stream()
            if waits:
                stream.wait_event(device.record_event())
                stream.run(lambda tensor=tensor: tensor.add_(1))
            else:
                with pytest.raises(RaceFound, match="possible data race"):
                    stream.run(lambda tensor=tensor: tensor.add_(1))


def test_hosts_that_wait_let_others_go_on_and_who_waits_for_nothing_that_comes_is_told():
    with World(0, 2) as world:
        first, second = world.devices

        def writes():
            tensor = on_gpu(2.0)
            yield RoutineWait(first.record_event(), "a kernel")
            return tensor.raw.tolist()[0]

        def reads():
            yield RoutineWait(second.record_event(), "nothing")
            assert world.here is second
            return on_gpu(3.0).sum().item()

        def stuck():
            stream = first.stream()
            event = first.stream().record_event()
            event.query = lambda: False
            stream.wait_event(event)
            yield RoutineWait(stream.record_event(), "what never comes")

        assert world.run([writes(), reads()]) == [2.0, 15.0]
        with pytest.raises(Deadlock, match=r"rank 0 waits for .*what never comes"):
            world.run([stuck(), reads()])
