"""What is asked of Ray for workers: placement groups that are made, waited for, found again and removed, without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from raypar.actors import first_placement, worker_pool, worker_registry
from raypar.actors.cluster_info import NodeResources, memory_per_worker, zones_of_nodes
from raypar.actors.first_placement import FirstPlacement, make_groups
from raypar.actors.plan_cache import PlanCache
from raypar.actors.worker_pool import FoundGroups, WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic import events as on
from raypar.elastic.desired_capacity import StartLimits
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import ClusterError
from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.ray_compat.autoscaler import AutoscalerAnswer


class Group:
    """A placement group of `FakeRay`."""

    def __init__(self, name, bundles, strategy, selector) -> None:
        self.name, self.bundles, self.strategy, self.selector = name, bundles, strategy, selector
        self.state = "PENDING"
        self.id = SimpleNamespace(hex=lambda: f"{id(self):x}")
        self.group_id = PlacementGroupID.from_random().hex()


class FakeRay:
    """Placement groups and named actors, in this process."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.actors: dict[str, object] = {}
        self.drivers: list[dict[str, str]] = []

    def make(self, bundles, strategy, name, lifetime, bundle_label_selector) -> Group:
        self.groups.append(Group(name, bundles, strategy, bundle_label_selector))
        return self.groups[-1]

    def remove(self, group: Group | PlacementGroup) -> None:
        if isinstance(group, PlacementGroup):
            (group,) = [g for g in self.groups if g.group_id == group.id.hex()]
        group.state = "REMOVED"

    def table(self):
        return {
            g.id.hex(): {
                "name": g.name,
                "placement_group_id": g.group_id,
                "state": g.state,
                "bundles": dict(enumerate(g.bundles)),
                "bundles_to_node_id": dict.fromkeys(range(len(g.bundles)), "node"),
            }
            for g in self.groups
        }

    def place(self, *names: str) -> None:
        for group in self.groups:
            if group.state == "PENDING" and (not names or group.name in names):
                group.state = "CREATED"

    @property
    def states(self) -> dict[str, str]:
        return {group.name: group.state for group in self.groups}


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    named = SimpleNamespace(
        get_actor=lambda name, namespace: fake.actors[name],
        util=SimpleNamespace(list_named_actors=lambda all_namespaces: fake.drivers),
    )
    monkeypatch.setattr(worker_pool, "ray", named)
    monkeypatch.setattr(worker_pool, "placement_group", fake.make)
    monkeypatch.setattr(worker_pool, "remove_placement_group", fake.remove)
    monkeypatch.setattr(worker_pool, "placement_group_table", fake.table)
    monkeypatch.setattr(worker_pool, "max_workers_per_node", lambda gpus: 0)
    monkeypatch.setattr(worker_pool, "has_autoscaler", lambda: True)
    numbers = lambda run: [int(name.removeprefix("worker-")) for name in fake.actors]  # noqa: E731
    monkeypatch.setattr(worker_pool, "find_existing_worker_numbers", numbers)
    monkeypatch.setattr(worker_pool, "SHUN_S", 0.2)
    return fake


def pool(placement: PlacementConstraints | None = None) -> WorkerPool:
    return WorkerPool(RunCredential.fresh("run"), placement)


def test_a_replica_is_one_group_on_one_node_with_labels_and_accelerator(ray):
    asked = pool(PlacementConstraints(1, "H100", {"market": "spot"}, on_demand=2))
    asked.request_group((4, 5), {"lost"})
    asked.request_group((6,), on_demand=True)
    pair, single = ray.groups
    assert pair.name == "raypar-run-4" and pair.strategy == "STRICT_PACK"
    assert pair.bundles == [{"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}] * 2
    assert pair.selector == [{"market": "spot", "ray.io/node-id": "!in(lost)"}] * 2
    assert single.selector == [{"market": "spot", "ray.io/market-type": "on-demand"}]
    ray.place("raypar-run-4")
    assert asked.placed_workers() == {4: "node", 5: "node"}


def test_shards_are_put_on_one_node_where_nodes_are_too_small_and_none_are_added(ray, monkeypatch):
    monkeypatch.setattr(worker_pool, "has_autoscaler", lambda: False)
    pool().request_group((0, 1))
    assert ray.groups[0].strategy == "PACK"


def test_a_group_without_a_place_is_withdrawn_when_its_workers_are_given_back(ray):
    async def scene():
        asked = pool()
        asked.request_group((4, 5))
        waiting = asyncio.ensure_future(asked.wait_until_placed((4, 5)))
        await asyncio.sleep(0.05)
        for number in (4, 5):
            asked.dismiss(number)()
        assert not await waiting
        asked.request_group((4, 5))  # the order came before the group was made
        return asked

    asked = asyncio.run(scene())
    assert [group.state for group in ray.groups] == ["REMOVED", "REMOVED"] and not asked.groups


def test_a_group_that_somebody_else_removes_is_an_error(ray):
    async def scene():
        asked = pool()
        asked.request_group((4,))
        waiting = asyncio.ensure_future(asked.wait_until_placed((4,)))
        await asyncio.sleep(0.05)
        ray.remove(ray.groups[0])
        await waiting

    with pytest.raises(ClusterError, match="placement group was removed"):
        asyncio.run(scene())


def test_slow_nodes_are_taken_after_a_while_with_the_same_labels_and_lost_ones_never(ray):
    async def scene():
        asked = pool(PlacementConstraints(label_selector={"market": "spot"}, on_demand=1))
        asked.request_group((4,), {"lost", "slow"}, on_demand=True)
        waiting = asyncio.ensure_future(asked.wait_until_placed((4,), lambda: {"lost"}, {"slow"}, on_demand=True))
        while len(ray.groups) < 2:
            await asyncio.sleep(0.05)
        ray.place()
        assert await waiting

    asyncio.run(scene())
    first, second = ray.groups
    assert first.state == "REMOVED" and first.selector[0]["ray.io/node-id"] == "!in(lost,slow)"
    assert second.selector == [{"market": "spot", "ray.io/market-type": "on-demand", "ray.io/node-id": "!in(lost)"}]


def test_a_worker_that_waits_takes_a_node_as_soon_as_that_is_not_suspected_any_more(ray):
    """It was asked for while no other node had room, and waited for ever beside a machine that was well again."""
    suspected = {"cut off", "lost"}

    async def scene():
        asked = pool()
        asked.request_group((4, 5), suspected)
        waiting = asyncio.ensure_future(asked.wait_until_placed((4, 5), lambda: suspected))
        await asyncio.sleep(0.3)
        assert len(ray.groups) == 1
        suspected.remove("cut off")
        while len(ray.groups) < 2:
            await asyncio.sleep(0.05)
        ray.place()
        assert await waiting
        assert asked.groups == {4: ray.groups[1], 5: ray.groups[1]}

    asyncio.run(scene())
    first, second = ray.groups
    assert first.state == "REMOVED" and second.selector == [{"ray.io/node-id": "!in(lost)"}] * 2


def test_a_group_that_lies_on_a_node_which_has_just_joined_is_asked_for_anew_while_nodes_flap(ray):
    """Its node joined after the request, which could not name it."""
    noted: list[str] = []

    async def scene():
        asked = pool()
        asked.request_group((4, 5))
        young = lambda: set(noted[:1]) if len(ray.groups) == 1 else set()  # noqa: E731
        waiting = asyncio.ensure_future(asked.wait_until_placed((4, 5), young, note_node=noted.append))
        ray.place()
        while len(ray.groups) < 2:
            await asyncio.sleep(0.05)
        assert not waiting.done()
        ray.place()
        assert await waiting
        assert asked.groups == {4: ray.groups[1], 5: ray.groups[1]}

    asyncio.run(scene())
    first, second = ray.groups
    assert first.state == "REMOVED" and second.selector == [{"ray.io/node-id": "!in(node)"}] * 2
    assert noted == ["node", "node"]


def test_a_new_driver_finds_workers_and_demand_but_does_not_start_the_dead_again(ray):
    asked = pool()
    for numbers in ((0, 1), (2, 3), (4, 5), (6,)):
        asked.request_group(numbers)
    ray.actors = {"worker-0": "zero", "worker-2": "two", "worker-3": "three"}
    successor = pool()
    assert successor.find({0, 1, 2, 3, 6}) == FoundGroups(((4, 5),), ((0,), (2, 3)))
    assert successor.workers == {0: "zero", 2: "two", 3: "three"} and set(successor.groups) == {0, 2, 3, 4, 5}
    assert ray.states["raypar-run-6"] == "REMOVED", "worker 6 had joined, and is gone"


def test_a_worker_that_another_driver_has_started_is_taken_over_and_its_group_kept(ray, monkeypatch):
    """Both had found the same group; the one that was taken for dead must not remove it."""

    def taken(*given):
        raise ValueError("the name is taken")

    made = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=taken))
    monkeypatch.setattr(worker_pool, "make_worker_actor_class", lambda: made)
    monkeypatch.setattr(worker_pool, "PlacementGroupSchedulingStrategy", lambda *args, **more: "there")
    asked, ray.actors = pool(), {"worker-4": "theirs"}
    asked.request_group((4,))
    assert asked.start_worker(4, b"", None, 60.0) == "theirs" == asked.workers[4]
    assert ray.states == {"raypar-run-4": "PENDING"}


def test_both_shards_of_a_group_start_and_are_reported_once_it_has_a_place(ray, monkeypatch):
    posted, started = [], []
    asked = pool()
    monkeypatch.setattr(asked, "start_worker", lambda number, *given: started.append(number) or number)
    monkeypatch.setattr(
        worker_registry, "list_live_node_resources", lambda: {"node": NodeResources({}, {"ray.io/availability-zone": "a"})}
    )
    registry = WorkerRegistry(asked, None, posted.append, lambda kind, **facts: None, lambda number: False, None)

    async def hello(number, worker, start_s):
        posted.append(on.WorkerJoined(number))

    monkeypatch.setattr(registry, "await_hello", hello)
    begin = SimpleNamespace(spec=b"", listen_host=None, orphan_timeout_s=60.0, start_deadline_s=60.0)

    async def scene():
        starting = asyncio.ensure_future(registry.start_workers((4, 5), begin))
        await asyncio.sleep(0.1)
        assert not posted
        ray.place()
        await starting

    asyncio.run(scene())
    assert started == [4, 5] and registry.zone_of_node == {"node": "a"}
    assert posted == [on.WorkerPlaced(4), on.WorkerPlaced(5), on.WorkerJoined(4), on.WorkerJoined(5)]


# -- the first workers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(ray, monkeypatch):
    """What the autoscaler and the nodes say."""
    said = SimpleNamespace(verdict=AutoscalerAnswer(), nodes={})
    monkeypatch.setattr(first_placement, "read_autoscaler_answer", lambda: said.verdict)
    monkeypatch.setattr(first_placement, "list_live_node_resources", lambda: said.nodes)
    capacity = SimpleNamespace(may_add_nodes=True, cpus=0, free_cpus=0, gpus=0)
    monkeypatch.setattr(first_placement, "cluster_capacity", lambda: capacity)
    monkeypatch.setattr(first_placement, "ASK_AUTOSCALER_S", 0.02)
    monkeypatch.setattr(first_placement, "CERTAIN_S", 0.1)
    monkeypatch.setattr(first_placement, "SAY_S", 0.0)
    said.ray = ray
    return said


def begins(cluster, limits, then=lambda: None, fits=lambda placed, facts: True, placement=None):
    """The workers with which a run of four begins, and the lines that were said; `then` happens after a while."""
    said = []

    async def scene():
        asked = pool(placement)
        first = FirstPlacement(asked, make_groups(ParallelPlan.mesh(dp=4, layers=2)), limits, said.append, fits)
        waiting = asyncio.ensure_future(first.wait())
        await asyncio.sleep(0.1)
        then()
        return await waiting

    return asyncio.run(scene()), said


def test_a_run_begins_with_those_that_have_a_place_and_the_demand_for_the_others_stays(cluster):
    limits = StartLimits(4, 1, 0.2, 10.0)
    placed, said = begins(cluster, limits, lambda: cluster.ray.place("raypar-run-0", "raypar-run-2"))
    assert placed == {0: "node", 2: "node"}
    assert sorted(cluster.ray.states.values()) == ["CREATED", "CREATED", "PENDING", "PENDING"]
    assert said[0].startswith("waiting for 4 more workers: the cluster has a place for 0 of 4, an autoscaler is running;")
    assert begins(cluster, limits, cluster.ray.place)[0] == dict.fromkeys(range(4), "node")


def test_a_run_does_not_begin_with_workers_for_which_no_plan_fits_into_memory(cluster):
    asked = []

    def fits(placed, facts):
        asked.append(sorted(placed))
        if len(placed) == 1:
            cluster.ray.place("raypar-run-3")
        return len(placed) > 1

    placed, _ = begins(cluster, StartLimits(4, 1, 0.1, 10.0), lambda: cluster.ray.place("raypar-run-0"), fits)
    assert placed.keys() == {0, 3} and asked == [[0], [0, 3]], "asked once for each number"
    with pytest.raises(ClusterError, match="only 1 of 4 workers could be placed within 1 s"):
        begins(
            cluster,
            StartLimits(4, 1, 0.1, 0.6),
            lambda: cluster.ray.groups[4].__setattr__("state", "CREATED"),
            lambda *a: False,
        )


def test_what_no_node_can_hold_is_an_error_only_where_the_run_cannot_begin(cluster):
    def refuse(*numbers):
        return lambda: setattr(
            cluster,
            "verdict",
            AutoscalerAnswer(frozenset(cluster.ray.groups[len(cluster.ray.groups) - 4 + n].id.hex() for n in numbers)),
        )

    spot, limits = PlacementConstraints(label_selector={"market": "spot"}), StartLimits(4, 2, 0.1, 10.0)
    with pytest.raises(ClusterError, match=r"no node for 3 of 4 workers, .* at least 2: .* \{CPU: 1\} with market=spot"):
        begins(cluster, limits, refuse(1, 2, 3), placement=spot)

    def refuse_some():
        refuse(2, 3)()
        cluster.ray.place(*(group.name for group in cluster.ray.groups[4:6]))

    placed, said = begins(cluster, StartLimits(4, 2, 0.4, 10.0), refuse_some, placement=spot)
    assert placed.keys() == {0, 1} and any("but it adds no node for 2 of them" in line for line in said), said


def test_a_cluster_that_is_full_or_still_grows_is_no_error(cluster):
    def refuse_all(**more):
        cluster.verdict = AutoscalerAnswer(frozenset(group.id.hex() for group in cluster.ray.groups), **more)

    def busy():
        cluster.nodes = {"node": NodeResources({"CPU": 1.0})}
        refuse_all()

    for then in (busy, lambda: refuse_all(launching=True)):
        with pytest.raises(ClusterError, match="only 0 of 4 workers could be placed within 1 s"):
            begins(cluster, StartLimits(4, 4, 0.1, 0.6), then)
        cluster.nodes = {}
    with pytest.raises(ClusterError, match="no node for 4 of 4"):
        begins(cluster, StartLimits(4, 4, 0.1, 5.0), refuse_all)

    def ours():
        cluster.ray.place("raypar-run-0")
        busy()

    with pytest.raises(ClusterError, match="no node for 3 of 4"):
        begins(cluster, StartLimits(4, 4, 0.1, 5.0), ours)


def test_the_wait_ends_when_the_run_does(cluster):
    async def scene():
        asked = pool()
        waiting = asyncio.ensure_future(
            FirstPlacement(asked, make_groups(ParallelPlan.mesh(layers=2)), StartLimits(1, 1, 0.1, 60.0), print).wait()
        )
        await asyncio.sleep(0.1)
        await asked.close()
        with pytest.raises(ClusterError, match="has ended"):
            await waiting

    asyncio.run(scene())
    assert set(cluster.ray.states.values()) == {"REMOVED"}


# -- the first plan ------------------------------------------------------------------------------------------------------------


def plans(plan: ParallelPlan) -> PlanCache:
    sizes = {"activation_bytes": 1000, "output_bytes": 100, "parameter_bytes": 1000, "optimizer_bytes": 2000}
    profile = ModelProfile(tuple(LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0, **sizes) for i in range(4)))
    return PlanCache(
        SimpleNamespace(
            plan=plan, schedule_name="1f1b", profile=profile, batching=Microbatches(8), job=SimpleNamespace(virtual_shards=0)
        )
    )


def test_a_first_plan_fits_into_the_memory_of_the_nodes_and_keeps_the_jobs_shards():
    cache = plans(ParallelPlan.mesh(dp=2, pp=2, layers=4))
    assert cache.first(4, 1) == ParallelPlan.mesh(dp=2, pp=2, layers=4), "the job's own"
    assert cache.first(3, None).world == 3 and cache.first(1, None).world == 1
    assert cache.first(1, 10_000) is None and cache.first(1, None).world == 1, "the memory was of those workers only"
    uneven = plans(ParallelPlan.of([1, 1, 1], shards=[1, 1, 2], layers=4))
    assert uneven.first(2, None) is None, "other shards would give other results"


def test_each_worker_has_its_share_of_its_nodes_memory():
    facts = {"a": NodeResources({"memory": 8.0}), "b": NodeResources({"memory": 6.0}), "c": NodeResources()}
    assert memory_per_worker({0: "a", 1: "a", 2: "b", 3: "c"}, facts) == 4
    assert memory_per_worker({3: "c", 4: "gone"}, facts) is None
    assert zones_of_nodes({"a": NodeResources({}, {"ray.io/availability-zone": "z"}), "b": NodeResources()}) == {"a": "z"}


def test_what_runs_without_a_driver_had_reserved_is_given_back_and_nothing_of_any_other(ray):
    for name in (
        "raypar-gone-0",
        "raypar-gone-2",
        "raypar-living-0",
        "raypar-gone-1-0",
        "raypar-living-1-0",
        "other-0",
        "raypar-7",
    ):
        ray.make([{"CPU": 1}], "PACK", name, "detached", None)
    ray.drivers = [
        {"namespace": "raypar-living", "name": "driver"},
        {"namespace": "raypar-gone-1", "name": "driver"},
        {"namespace": "raypar-gone", "name": "worker-0"},  # of a driver's workers some may be left
    ]
    assert worker_pool.remove_placement_groups_of_ended_runs() == {"gone": 2, "living-1": 1}
    assert [name for name, state in ray.states.items() if state == "REMOVED"] == [
        "raypar-gone-0",
        "raypar-gone-2",
        "raypar-living-1-0",
    ]
    assert worker_pool.remove_placement_groups_of_ended_runs() == {}
