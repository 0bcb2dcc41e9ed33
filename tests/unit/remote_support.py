"""Attention clients and FFN loops of one deployment in one process, without vLLM."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from thread_collective import meet

from afd.config.deployment import Deployment
from afd.config.resolve import Resolved, resolve
from afd.control.messages import Member, Members
from afd.control.moves import Moves, settled
from afd.errors import AfdError, DeadlineExceeded
from afd.metrics.role import RoleMetrics
from afd.topology import FfnPlace, member_id
from afd_comm import Region, VerbsOptions
from attention_worker.remote.host import RemoteExperts
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.experts.model import FfnModel
from ffn_worker.loop import FfnLoop
from ffn_worker.pool.links import PoolLinks
from ffn_worker.rank import FfnRank

DEPTH = 3

# Its first call imports sympy: more than a second where no bytecode is kept yet, and members of a
# step that waits for it would be late.
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))


class Registry:
    """The control plane's snapshot, changed by the test itself."""

    def __init__(self):
        self.members = Members(0, ())
        self.callbacks = []
        self.lock = threading.RLock()
        self.moves: dict[str, tuple[int, str]] = {}

    def set(self, *members: Member) -> None:
        self.change(members=tuple(sorted(members, key=lambda m: (m.role, m.index, m.rank))))

    def change(self, **fields: object) -> None:
        with self.lock:
            self.take(msgspec.structs.replace(self.members, **fields))

    def take(self, members: Members) -> None:
        self.members = msgspec.structs.replace(members, version=self.members.version + 1)
        for callback in list(self.callbacks):
            callback(self.members)


@dataclass
class FakeControl:
    """Stands in for a role's ControlClient; reads the shared registry."""

    registry: Registry
    generation: int
    name: str = ""
    renew: Callable[[], None] = lambda: None

    @property
    def members(self) -> Members:
        return self.registry.members

    def on_change(self, callback) -> None:
        self.registry.callbacks.append(callback)

    def report_move(self, number: int, fault: str = "") -> None:
        self.registry.moves[self.name] = (number, fault)

    def wait_for(self, predicate, *, deadline_s, what):
        end = time.monotonic() + deadline_s
        while not predicate(self.members):
            if time.monotonic() > end:
                raise DeadlineExceeded(f"{what} did not come")
            time.sleep(0.01)
        return self.members


def in_background(work, *args):
    """Returns (an unstarted thread that runs ``work``, the list that receives its exception)."""
    raised = []

    def run():
        try:
            work(*args)
        except BaseException as error:
            raised.append(error)

    return threading.Thread(target=run), raised


class Deployed:
    """x attention clients and the FFN loops of y instances, each rank's loop on its own thread."""

    STREAMS = ("ipc",)
    """Backends whose steps may be announced."""

    def __init__(self, checkpoint, x, y, backend="reference", **sections):
        self.backend = backend
        self.deployment = self.parsed(
            checkpoint,
            {
                "attention": {
                    "instances": x,
                    "dtype": "float32",
                    "max_num_batched_tokens": 64,
                    **sections.pop("attention", {}),
                },
                "ffn": {"instances": y, **sections.pop("ffn", {})},
                "pipeline": {"depth": DEPTH, "min_rows": 1},
                "deadlines": {"ffn_s": 10.0, "start_s": 5.0},
                **sections,
            },
        )
        self.resolved: Resolved = resolve(self.deployment)
        # The reference accelerator executes its streams on the calling thread.
        self.streams = self.deployment.transport.backend in self.STREAMS
        self.registry = Registry()
        self.controls: dict[str, FakeControl] = {}  # by member id
        self.generation = 100
        self.loops, self.threads, self.regions, self.ranks = {}, {}, {}, {}  # by rank number
        self.ended: dict[int, AfdError] = {}
        self.members: dict[str, Member] = {}
        self.lock = threading.Lock()
        for number in range(y * self.resolved.contract.ffn_tp):
            self.start_ffn(number)
        self.clients = [self.client(i) for i in range(self.resolved.slots.attention_ranks)]

    @staticmethod
    def parsed(checkpoint, sections):
        return Deployment.from_plain(
            {"model": str(checkpoint), "served_model_name": "m", **sections}
        )

    def member(self, role, index, region, *, rank=0, state="ready", generation=None, orders=()):
        if generation is None:
            self.generation += 1
        member = Member(
            role=role,
            index=index,
            rank=rank,
            generation=generation or self.generation,
            addresses=tuple(region.addresses),
            order_addresses=orders,
            state=state,
        )
        self.join(member)
        return member

    def join(self, member):
        with self.lock:
            self.members[member.id] = member
            self.registry.set(*self.members.values())
        for number in list(self.loops):
            self.loops[number].wake()

    def leave(self, name):
        with self.lock:
            self.members.pop(name, None)
            self.registry.set(*self.members.values())
        for number in list(self.loops):
            self.loops[number].wake()

    def renew(self, role, index, rank=0):
        """Gives a live member a new generation, as if it was removed and registered again."""
        name = member_id(role, index, rank)
        with self.lock:
            self.generation += 1
            old = self.members[name]
            self.members[name] = msgspec.structs.replace(old, generation=self.generation)
            self.controls[name].generation = self.generation
            self.registry.set(*self.members.values())

    def of_ffn(self, resolved: Resolved) -> Resolved:
        """Returns the facts as the FFN ranks see them."""
        return resolved

    def region(self, role, slots, nbytes, index, tcp_host=None):
        verbs = self.deployment.transport.verbs_keywords(role)
        options = VerbsOptions(**verbs) if verbs else None
        region = Region(slots, nbytes, name=f"{role}-{index}", tcp_host=tcp_host, verbs=options)
        if self.streams:
            region.pin("cpu")
        return region

    def start_ffn(self, number):
        """Starts one rank; it serves once it has met the other ranks."""
        r = self.of_ffn(self.resolved)
        index, rank = divmod(number, r.contract.ffn_tp)
        place = FfnPlace(index, rank, r.contract.ffn_instances, r.contract.ffn_tp)
        region = self.region("ffn", r.slots.ffn_region_slots, r.a2f.nbytes, number)
        self.generation += 1
        name = member_id("ffn", index, rank)
        control = self.controls[name] = FakeControl(self.registry, self.generation, name)
        ranks = PoolLinks(r, place, control)
        orders = ranks.addresses
        member = self.member(
            "ffn", index, region, rank=rank, state="starting", generation=control.generation,
            orders=orders,
        )  # fmt: skip
        thread = threading.Thread(
            target=self.serve, args=(number, member, region, control, ranks), daemon=True
        )
        self.threads[number], self.regions[number], self.ranks[number] = thread, region, ranks
        self.ended.pop(number, None)
        thread.start()

    def serve(self, number, member, region, control, ranks):
        r, place = self.of_ffn(self.resolved), ranks.place
        try:
            places = settled(self.registry.members, r.placement, r.model.moe_layers)
            tables = tuple(table for _, table in places.values())
            model = load_ffn_model(
                r.deployment.model,
                r.family,
                r.model,
                instances=place.instances,
                index=place.instance,
                tp=place.tp,
                rank=place.rank,
                placement=replace(r.placement, tables=tables),
                banks={layer: bank for layer, (bank, _) in places.items()},
                shared_by_rows=r.shared_by_rows,
                backend=self.backend,
            )

            ranks.meet(lambda address: meet(place.rank, place.tp, address), 10.0)
            loop = FfnLoop(FfnRank(r, region, control, model, ranks, RoleMetrics("ffn")))
            self.loops[number] = loop
            loop.moves.catch_up()
            if self.streams:
                loop.capture_graphs()
            self.join(msgspec.structs.replace(member, state="ready"))
            with torch.inference_mode():  # as in ffn_worker.main
                loop.run()
        except AfdError as error:
            self.ended[number] = error
        finally:
            if number in self.loops:
                for peer in self.loops[number]._table.peers:
                    peer.link.close()
            ranks.close()
            region.close()
            self.leave(member.id)

    def stop_ffn(self, number):
        self.loops[number].stopping = True
        self.loops[number].wake()
        self.threads[number].join(10)
        assert not self.threads[number].is_alive()

    def client(self, i):
        """i: number among all attention ranks."""
        r = self.resolved
        index, rank = divmod(i, r.contract.attention_tp)
        region = self.region("attention", r.slots.attention_region_slots, r.f2a.nbytes, i)
        member = self.member("attention", index, region, rank=rank)
        renew = partial(self.renew, "attention", index, rank)
        control = FakeControl(self.registry, member.generation, member.id, renew)
        self.controls[member.id] = control
        client = RemoteExperts(r, i, region, control, RoleMetrics("attention"))
        client.connect(max(30.0, self.deployment.deadlines.start_s))
        return client

    def move(self, tables, deadline_s=20.0):
        """Moves all experts as the control plane does; returns when they have moved."""
        moves, contract = Moves(), self.resolved.contract
        with self.registry.lock:
            self.registry.take(moves.plan(tables, contract, self.registry.members))
        end = time.monotonic() + deadline_s
        while self.registry.members.moves_left:
            assert time.monotonic() < end, self.registry.members
            with self.registry.lock:
                members = self.registry.members
                done = {
                    (m.role, m.index, m.rank): self.registry.moves.get(m.id, (0, ""))[0]
                    for m in members.members
                }
                following = moves.advance(members, contract, done)
                if following is not None:
                    self.registry.take(following)
            time.sleep(0.002)

    def close(self):
        for number in list(self.loops):
            self.loops[number].stopping = True
        for number in list(self.loops):
            self.stop_ffn(number)
        for client in self.clients:
            client.close()


@contextmanager
def deploying(kind=Deployed):
    """Yields a function that makes deployments of this kind (default: :class:`Deployed`) from its
    arguments; all of them are closed at the end."""
    with ExitStack() as stack:

        def start(*arguments, **sections):
            return stack.enter_context(closing(kind(*arguments, **sections)))

        yield start


def reference_model(checkpoint) -> FfnModel:
    """Returns all experts of a checkpoint with backend "reference", in float32."""
    deployment = Deployment.from_plain(
        {
            "model": str(checkpoint),
            "served_model_name": "m",
            "attention": {"dtype": "float32"},
        }
    )
    r = resolve(deployment)
    return load_ffn_model(
        deployment.model, r.family, r.model, instances=1, index=0, backend="reference"
    )


def random_rows(resolved, rows, seed):
    g = torch.Generator().manual_seed(seed)
    model = resolved.model
    x = torch.randn(rows, model.hidden, generator=g)
    scores = torch.rand(rows, model.num_experts, generator=g)
    weights, ids = scores.topk(model.top_k, dim=-1)
    return x, ids.int().contiguous(), weights.contiguous()


def run_step(client, resolved, reference, sizes, seed, pause=0.0):
    """Runs one step through its MoE layers; sizes: rows per micro-batch. Checks every answer."""
    client.begin_step(len(sizes))
    sent = {}
    for layer in resolved.model.step_layers:
        for mb, rows in enumerate(sizes):
            if mb in sent:
                check(client, reference, mb, sent.pop(mb))
            x, ids, weights = random_rows(resolved, rows, hash((seed, layer, mb)) % 2**31)
            client.send(layer, mb, x, ids, weights)
            sent[mb] = (layer, x, ids, weights)
            time.sleep(pause)
    for mb in list(sent):
        check(client, reference, mb, sent.pop(mb))
    client.end_step()


def check(client, reference, mb, sent):
    layer, x, ids, weights = sent
    expected = reference.forward(layer, x, ids, weights)
    torch.testing.assert_close(client.recv(mb), expected, rtol=1e-5, atol=1e-5)


class Traffic:
    """Runs steps on every attention instance inside the block; the reference checks each step."""

    def __init__(self, deployed, expected):
        self.errors: list[BaseException] = []
        self.steps = [0] * len(deployed.clients)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(deployed, expected, i))
            for i in range(len(deployed.clients))
        ]

    def _run(self, deployed, expected, i):
        try:
            while not self._ended.is_set():
                self.run_step(deployed, expected, i)
                self.steps[i] += 1
        except BaseException as error:
            self.errors.append(error)
        deployed.clients[i].leave()

    def run_step(self, deployed, expected, i):
        """Runs one step of attention instance i."""
        run_step(deployed.clients[i], deployed.resolved, expected, [3, 2], (i, self.steps[i]))

    def run_on(self, steps=3):
        """Returns once every attention instance has run so many more steps."""
        wanted = [n + steps for n in self.steps]
        while any(n < w for n, w in zip(self.steps, wanted, strict=True)) and not self.errors:
            time.sleep(0.002)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        for thread in self._threads:
            thread.join(20)
        assert not self.errors, self.errors
        assert min(self.steps) > 0
