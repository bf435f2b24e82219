"""State machines: whatever the order of operations, the pool, the manager and the scheduler stay consistent."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from trivet.runtime.config import SchedulerConfig
from trivet.runtime.kv_cache.block_hash import make_block_hasher
from trivet.runtime.kv_cache.block_pool import BlockPool, KVCacheBlock
from trivet.runtime.kv_cache.manager import KVCacheManager
from trivet.runtime.request import Request, RequestStatus
from trivet.runtime.sampling_params import SamplingParams
from trivet.runtime.scheduler.output import ModelRunnerOutput, SchedulerOutput
from trivet.runtime.scheduler.scheduler import Scheduler

MACHINE_SETTINGS = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
BLOCK_SIZE = 4


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: how many times each block is held, and which content it was last given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, enable_caching=True)
        self.holds: list[KVCacheBlock] = []

    @rule(n=st.integers(0, 5))
    def get_new_blocks(self, n: int) -> None:
        if n > self.pool.get_num_free_blocks():
            return
        in_order = [*itertools.islice(self.pool.free_block_queue.ids(), n)]
        blocks = self.pool.get_new_blocks(n)
        assert [block.block_id for block in blocks] == in_order
        assert not any(b in self.holds or b.is_null for b in blocks)
        self.holds += blocks

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.holds.remove(block)
        self.pool.free_blocks([block])

    @rule(content=st.integers(0, 5), data=st.data())
    def cache(self, content: int, data: st.DataObject) -> None:
        uncached = [b for b in self.holds if b.block_hash is None]
        if uncached:
            block = data.draw(st.sampled_from(uncached))
            self.pool.cache_full_blocks([block], [bytes([content])])

    @rule(content=st.integers(0, 5))
    def hit(self, content: int) -> None:
        block = self.pool.get_cached_block(bytes([content]))
        assert (block is not None) == any(b.block_hash == bytes([content]) for b in self.pool.blocks)
        if block is not None:
            self.pool.touch([block])
            self.holds.append(block)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.holds)

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        for block in self.pool.blocks:
            assert block.ref_cnt == self.holds.count(block)


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Requests of few distinct tokens, so that prefixes are shared often."""

    requests: Bundle[Request] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(num_gpu_blocks=12, block_size=BLOCK_SIZE, max_model_len=64, watermark=0.1)
        self.count = 0

    @rule(target=requests, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def new_request(self, prompt: list[int]) -> Request:
        self.count += 1
        request = Request(str(self.count), prompt, SamplingParams())
        request.set_block_hasher(make_block_hasher(BLOCK_SIZE))
        return request

    @rule(request=requests, wanted=st.integers(1, 12), whole=st.booleans(), others=st.booleans())
    def allocate(self, request: Request, wanted: int, whole: bool, others: bool) -> None:
        hits: list[KVCacheBlock] = []
        num_hits = 0
        if request.num_computed_tokens == 0:
            hits, num_hits = self.manager.get_computed_blocks(request)
            assert num_hits < request.num_tokens and num_hits % BLOCK_SIZE == 0
        wanted = min(wanted, request.num_tokens - request.num_computed_tokens - num_hits)
        if wanted == 0:
            return
        free = self.manager.block_pool.get_num_free_blocks()
        blocks = self.manager.allocate_slots(
            request, wanted, new_computed_blocks=hits, full_sequence_must_fit=whole, has_scheduled_reqs=others
        )
        if blocks is None:
            assert self.manager.block_pool.get_num_free_blocks() == free
            return
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens += num_hits + wanted
        table = self.manager.get_block_ids(request.request_id)
        assert len(table) == -(-request.num_computed_tokens // BLOCK_SIZE)
        assert table[: len(hits)] == [b.block_id for b in hits] or not hits

    @rule(request=requests)
    def free(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    @rule(request=consumes(requests))
    def forget(self, request: Request) -> None:
        self.free(request)

    @invariant()
    def consistent(self) -> None:
        self.manager.check_integrity()
        assert 0 <= self.manager.usage <= 1


class SchedulerMachine(RuleBasedStateMachine):
    """With a KV cache that says which token a slot holds: requests have to find their own tokens there."""

    copy_block_heads = False

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=4, watermark=0.05),
            num_gpu_blocks=9,
            block_size=BLOCK_SIZE,
            max_model_len=40,
            copy_block_heads=self.copy_block_heads,
        )
        self.slots: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(9)]
        self.added: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.told_to_runner: set[str] = set()

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=44), max_tokens=st.integers(1, 20), eos=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, eos: bool) -> None:
        request_id = f"r{len(self.added)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=not eos)
        self.added[request_id] = request = Request(request_id, prompt, params, eos_token_ids=[1])
        self.scheduler.add_request(request)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.added)))
        ended = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        assert (request_id in self.ended) == (not ended)
        self.ended.add(request_id)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=4), abort_first=st.booleans())
    def step(self, tokens: list[int], abort_first: bool) -> None:
        out = self.scheduler.schedule()
        assert out.total_num_scheduled_tokens == sum(out.num_scheduled_tokens.values()) <= 12
        assert len(out.scheduled) == len(out.num_scheduled_tokens) <= 4
        assert not out.finished_req_ids & self.told_to_runner
        self.told_to_runner |= out.finished_req_ids
        for item in out.scheduled:
            assert item.num_scheduled_tokens > 0
            end = item.num_computed_tokens + item.num_scheduled_tokens
            assert end <= item.request.num_tokens and len(item.block_ids) * BLOCK_SIZE >= end
        self.check_writers(out)
        self.compute(out)
        if abort_first and out.scheduled:
            victim = out.scheduled[0].request.request_id
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            self.ended.add(victim)
        sampled = {s.request.request_id: [t] for s, t in zip(out.scheduled, tokens, strict=False) if s.samples}
        result = self.scheduler.update_from_output(out, ModelRunnerOutput(sampled_token_ids=sampled))
        for output in result.outputs:
            assert output.request_id not in self.ended
            assert output.finish_reason is not None or len(output.new_token_ids) == 1
            if output.finished:
                self.ended.add(output.request_id)

    @rule()
    def failing_step(self) -> None:
        """What the step was to write is undefined, and its requests fail."""
        out = self.scheduler.schedule()
        self.told_to_runner |= out.finished_req_ids
        self.compute(out)
        for item in out.scheduled:
            for position in range(item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens):
                self.slots[item.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = None
        errors = dict.fromkeys(out.num_scheduled_tokens, "no memory")
        result = ModelRunnerOutput(sampled_token_ids={}, errors=errors, completed=False)
        self.ended |= {output.request_id for output in self.scheduler.update_from_output(out, result).outputs}

    def compute(self, out: SchedulerOutput) -> None:
        """What a model does to the KV cache: copies, then all writes, then all reads."""
        for source, target in out.block_copies:
            assert source != target and 0 not in (source, target)
            self.slots[target] = self.slots[source].copy()
        for item in out.scheduled:
            for position in range(item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens):
                block_id = item.block_ids[position // BLOCK_SIZE]
                self.slots[block_id][position % BLOCK_SIZE] = item.request.all_token_ids[position]
        for item in out.scheduled:
            end = item.num_computed_tokens + item.num_scheduled_tokens
            found = [token for block_id in item.block_ids for token in self.slots[block_id]][:end]
            assert found == item.request.all_token_ids[:end]

    def check_writers(self, out: Any) -> None:
        """No two requests of a step write the same KV slot, and none writes into a block that others read as prefix."""
        writers: dict[int, str] = {}
        for item in out.scheduled:
            first = item.num_computed_tokens // BLOCK_SIZE
            last = (item.num_computed_tokens + item.num_scheduled_tokens - 1) // BLOCK_SIZE
            for block_id in item.block_ids[first : last + 1]:
                assert block_id != 0
                assert writers.setdefault(block_id, item.request.request_id) == item.request.request_id

    @invariant()
    def consistent(self) -> None:
        self.scheduler.kv_cache_manager.check_integrity()
        unfinished = {i for i, r in self.added.items() if not r.is_finished}
        assert unfinished == set(self.added) - self.ended == set(self.scheduler.requests)
        queued = [r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)]
        assert sorted(queued) == sorted(unfinished)  # none lost, none twice

    def teardown(self) -> None:
        """Everything comes to its end in a bounded number of steps."""
        for _ in range(60 * (len(self.scheduler.requests) + 1)):
            if not self.scheduler.has_requests():
                break
            self.step([0, 0, 0, 0], False)
            self.consistent()
        assert not self.scheduler.has_requests()
        assert self.scheduler.kv_cache_manager.usage == 0
        assert self.told_to_runner == set(self.added)


class CopyingSchedulerMachine(SchedulerMachine):
    copy_block_heads = True


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = MACHINE_SETTINGS
TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = MACHINE_SETTINGS
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = MACHINE_SETTINGS
TestCopyingScheduler = CopyingSchedulerMachine.TestCase
TestCopyingScheduler.settings = MACHINE_SETTINGS
