"""LLM on the toy model: the same tokens however the scheduler cuts the work, and the options of a request."""

from __future__ import annotations

import math
import threading
import types
from contextlib import suppress
from typing import Any

import pytest
from trivet import LLM, RequestOutput, SamplingParams
from trivet.runtime.config import ConfigError
from trivet.runtime.errors import InvalidRequestError
from trivet.runtime.tokenizer.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[40 + (7 * i + j) % 80 for j in range(3 + 11 * i)] for i in range(8)]  # 3 .. 80 tokens


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", [{"temperature": 0}], 5])
def test_what_is_no_sampling_params_is_refused(package: str, params: Any) -> None:
    with LLM(package) as llm:
        with pytest.raises(InvalidRequestError, match=r"sampling_params must be a SamplingParams, got (dict|str|int)"):
            llm.generate("a", params)
        with pytest.raises(InvalidRequestError, match="sampling_params must be a SamplingParams, got"):
            next(llm.stream("a", params))
        assert llm.generate("a", GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 34, "block_size": 4, "max_model_len": 128},
        {"max_num_seqs": 2},
        {"block_size": 3},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "chunks_of_7", "preemption", "two_at_a_time", "block_size_3", "no_prefix_cache"],
)
def test_a_batch_gives_the_tokens_of_each_prompt_alone(
    package: str, toy: types.SimpleNamespace, options: dict[str, Any]
) -> None:
    expected = [toy.greedy(prompt, 24) for prompt in PROMPTS]
    with LLM(package, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == expected
        assert [o.prompt_token_ids for o in outputs] == PROMPTS
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        if "num_gpu_blocks_override" in options:
            assert llm.get_stats()["num_preemptions"] > 0
        again = llm.generate(PROMPTS[5], GREEDY)
        assert tokens(again) == [expected[5]]
        if "num_gpu_blocks_override" not in options:  # which has too few blocks to keep any
            assert (again[0].num_cached_tokens > 0) == options.get("enable_prefix_caching", True)
        stats = llm.get_stats()
        assert (stats["num_requests_running"], stats["num_requests_waiting"], stats["kv_cache_usage"]) == (0, 0, 0)


def test_a_prompt_chunk_samples_nothing(package: str, toy: types.SimpleNamespace) -> None:
    with LLM(package, max_num_batched_tokens=7, max_num_seqs=1) as llm:
        llm.generate(PROMPTS[7], GREEDY)
    assert toy.Session.instances[0].num_runs == math.ceil(80 / 7) + 23
    assert toy.Session.instances[0].rows_sampled == 24


def test_draws_depend_on_seed_and_position_only(package: str) -> None:
    sampled = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True)
    with LLM(package) as llm:
        alone = tokens(llm.generate(PROMPTS[3], sampled))
        assert tokens(llm.generate(PROMPTS, sampled))[3:4] == alone
        other = SamplingParams(temperature=1.5, seed=8, max_tokens=20, ignore_eos=True)
        assert tokens(llm.generate(PROMPTS[3], other)) != alone
        fresh = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
        assert tokens(llm.generate(PROMPTS[3], fresh)) != tokens(llm.generate(PROMPTS[3], fresh))
    with LLM(package, num_gpu_blocks_override=34, block_size=4, max_model_len=128) as llm:
        assert tokens(llm.generate(PROMPTS, sampled))[3:4] == alone
        assert llm.get_stats()["num_preemptions"] > 0


def test_an_engine_with_a_seed_repeats_itself(package: str) -> None:
    runs = []
    for _ in range(2):
        with LLM(package, seed=3) as llm:
            params = SamplingParams(temperature=1, max_tokens=9, ignore_eos=True)
            runs.append(tokens(llm.generate([PROMPTS[0], PROMPTS[0]], params)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_n_completions_are_those_of_consecutive_seeds(package: str) -> None:
    with LLM(package) as llm:
        params = SamplingParams(n=3, temperature=1.2, seed=2**63 - 2, max_tokens=10, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[2], params)
        assert [c.index for c in output.outputs] == [0, 1, 2]
        seeds = [2**63 - 2, 2**63 - 1, -(2**63)]
        singles = [
            llm.generate(PROMPTS[2], SamplingParams(temperature=1.2, seed=s, max_tokens=10, ignore_eos=True))[0]
            for s in seeds
        ]
        assert tokens([output]) == tokens(singles)
        assert len({tuple(t) for t in tokens([output])}) == 3
        # Completions that end in different steps still come as one output, when the last one has ended.
        stop = output.outputs[1].token_ids[2]
        assert all(stop not in output.outputs[i].token_ids for i in (0, 2))
        params = SamplingParams(n=3, temperature=1.2, seed=seeds[0], max_tokens=10, stop_token_ids=[stop])
        (uneven,) = llm.generate(PROMPTS[2], params)
        assert uneven.finished and [len(t) for t in tokens([uneven])] == [10, 3, 10]


def test_stop_strings_end_text_and_computation(package: str, toy: types.SimpleNamespace) -> None:
    with LLM(package) as llm:
        text = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
        assert text == bytes(toy.greedy(PROMPTS[1], 24)).decode()
        stop = text[9:12]
        cut = text.index(stop)
        runs = toy.Session.instances[0].num_runs
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["never", stop])
        completion = llm.generate(PROMPTS[1], params)[0].outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text[:cut], "stop", stop)
        assert toy.Session.instances[0].num_runs == runs + cut + 3
        params = SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=True
        )
        assert llm.generate(PROMPTS[1], params)[0].outputs[0].text == text[: cut + 3]
        assert llm.get_stats()["kv_cache_usage"] == 0


def test_stop_tokens_and_eos(package: str, toy: types.SimpleNamespace) -> None:
    force_eos = {toy.EOS: 100.0}
    with LLM(package) as llm:
        expected = toy.greedy(PROMPTS[1], 24)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[expected[6]])
        completion = llm.generate(PROMPTS[1], params)[0].outputs[0]
        end = expected.index(expected[6]) + 1
        assert (completion.token_ids, completion.stop_reason) == (expected[:end], expected[6])
        completion = llm.generate(PROMPTS[1], SamplingParams(temperature=0, logit_bias=force_eos))[0].outputs[0]
        assert (completion.token_ids, completion.text) == ([toy.EOS], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_min_tokens_bans_eos_until_then(package: str, toy: types.SimpleNamespace) -> None:
    params = SamplingParams(temperature=0, logit_bias={toy.EOS: 100.0}, min_tokens=5)
    with LLM(package) as llm:
        ids = llm.generate(PROMPTS[1], params)[0].outputs[0].token_ids
    assert len(ids) == 6
    assert ids[5] == toy.EOS
    assert toy.EOS not in ids[:5]


def test_bad_words_allowed_tokens_and_penalties(package: str, toy: types.SimpleNamespace) -> None:
    plain = toy.greedy(PROMPTS[4], 24)
    with LLM(package) as llm:

        def run(**options: Any) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **options)
            return llm.generate(PROMPTS[4], params)[0].outputs[0].token_ids

        word = bytes(plain[5:7]).decode()
        banned = run(bad_words=[word])
        assert banned[:6] == plain[:6]
        assert banned[6] != plain[6]
        assert word.encode() not in bytes(banned)
        assert plain[3] not in run(bad_words=[chr(plain[3])])
        assert set(run(allowed_token_ids=[65, 66])) == {65, 66}
        assert len(set(run(presence_penalty=2.0, frequency_penalty=2.0))) > len(set(plain))
        assert set(run(repetition_penalty=1e6)).isdisjoint(PROMPTS[4])
        assert run(repetition_penalty=1.0) == plain


def test_logprobs_of_samples_and_prompt(package: str, toy: types.SimpleNamespace) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    whole: list[RequestOutput] = []
    chunked: list[RequestOutput] = []
    options: dict[str, Any]
    for target, options in ((whole, {}), (chunked, {"max_num_batched_tokens": 7, "max_num_seqs": 7})):
        with LLM(package, **options) as llm:
            target += llm.generate(PROMPTS[:5], params)
            greedy = llm.generate(PROMPTS[4], GREEDY)[0]
    for one, other in zip(whole, chunked, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    output, completion = whole[4], whole[4].outputs[0]
    assert completion.token_ids == greedy.outputs[0].token_ids[:4]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [next(iter(p)) for p in completion.logprobs] == completion.token_ids
    assert [len(p) for p in completion.logprobs] == [3] * 4
    first = completion.logprobs[0][completion.token_ids[0]]
    assert (first.rank, first.decoded_token) == (1, chr(completion.token_ids[0]))
    assert completion.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPTS[4])
    for position, token in zip(output.prompt_logprobs[1:], PROMPTS[4][1:], strict=True):
        assert position is not None
        assert next(iter(position)) == token
        assert len(position) in (2, 3)


def test_prompt_logprobs_survive_preemption(package: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    with LLM(package) as llm:
        expected = [o.prompt_logprobs for o in llm.generate(PROMPTS, params)]
    with LLM(package, num_gpu_blocks_override=34, block_size=4, max_model_len=128, max_num_batched_tokens=64) as llm:
        assert [o.prompt_logprobs for o in llm.generate(PROMPTS, params)] == expected
        assert llm.get_stats()["num_preemptions"] > 0


def test_all_logprobs_when_the_engine_allows_them(package: str, toy: types.SimpleNamespace) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1)
    with LLM(package) as llm, pytest.raises(InvalidRequestError, match="max_logprobs=20"):
        llm.generate("ab", params)
    with LLM(package, max_logprobs=-1) as llm:
        logprobs = llm.generate("ab", params)[0].outputs[0].logprobs
        assert logprobs is not None
        assert [len(p) for p in logprobs] == [toy.VOCAB_SIZE] * 2


def test_stream_gives_deltas_that_add_up(package: str) -> None:
    with LLM(package) as llm:
        whole = llm.generate("hello there", GREEDY)[0].outputs[0]
        outputs = list(llm.stream("hello there", GREEDY))
        assert "".join(o.outputs[0].text for o in outputs) == whole.text
        assert [t for o in outputs for t in o.outputs[0].token_ids] == whole.token_ids
        assert [o.finished for o in outputs] == [False] * 23 + [True]
        stream = llm.stream("hello there", GREEDY)
        next(stream)
        assert llm.get_stats()["kv_cache_usage"] > 0
        with pytest.raises(InvalidRequestError, match="in use"):
            llm.generate("x")
        stream.close()
        assert llm.get_stats()["kv_cache_usage"] == 0
        assert llm.generate("hello there", GREEDY)[0].outputs[0].text == whole.text
        wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
        first, *others = llm.stream("hello", wanted)
        assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 5
        assert [o.prompt_logprobs for o in others] == [None] * 3  # said once


def test_streams_do_not_take_each_other_s_tokens(package: str) -> None:
    with LLM(package) as llm:
        first, second = llm.stream("hello there", GREEDY), llm.stream("yo", GREEDY)
        outputs = [next(first)]
        with pytest.raises(InvalidRequestError, match="in use"):
            next(second)
        outputs += first
        whole = llm.generate("hello there", GREEDY)[0].outputs[0]
        assert [t for o in outputs for t in o.outputs[0].token_ids] == whole.token_ids


def test_threads_at_once_are_refused(package: str) -> None:
    """Between a thread's look at the engine and its first request there is time for another one."""
    answers: list[str] = []
    with LLM(package) as llm:
        whole = llm.generate("hello there", GREEDY)[0].outputs[0].text
        process, both_in = llm._parts.input_processor.process, threading.Barrier(2)

        def process_together(*args: Any, **kwargs: Any) -> Any:
            with suppress(threading.BrokenBarrierError):
                both_in.wait(0.5)
            return process(*args, **kwargs)

        def ask() -> None:
            try:
                answers.append(llm.generate("hello there", GREEDY)[0].outputs[0].text)
            except InvalidRequestError as error:
                answers.append(str(error)[:18])

        llm._parts.input_processor.process = process_together  # type: ignore[method-assign]
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(answers) == sorted([whole, "this LLM is in use"])
        assert llm.generate("hello there", GREEDY)[0].outputs[0].text == whole


def test_chat_renders_the_template_and_adds_no_special_tokens(package: str) -> None:
    with LLM(package) as llm:
        one = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        many = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "yo"}]], GREEDY)
    assert one[0].prompt == "[user]hi[assistant]"
    assert [o.prompt for o in many] == ["[user]hi[assistant]", "[user]yo[assistant]"]
    assert tokens(many)[0] == tokens(one)[0]


def test_prompt_forms_and_defaults(package: str) -> None:
    with LLM(package) as llm:
        by_text = llm.generate("abc", GREEDY)
        forms: list[Any] = [
            [97, 98, 99],
            {"prompt": "abc"},
            {"prompt_token_ids": [97, 98, 99]},
            ["abc"],
            [[97, 98, 99]],
        ]
        for same in forms:
            assert tokens(llm.generate(same, GREEDY)) == tokens(by_text)
        assert llm.generate([], GREEDY) == []
        assert by_text[0].prompt == "abc"
        salted = llm.generate({"prompt": "abc" * 20, "cache_salt": "x"}, GREEDY)
        assert llm.generate("abc" * 20, GREEDY)[0].num_cached_tokens == 3  # of the unsalted prompts before
        assert tokens(salted) == tokens(llm.generate("abc" * 20, GREEDY))
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.5, 7, 16)
        rest = llm.generate("abc", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].outputs[0]
        assert len(rest.token_ids) == 512 - 3
        assert rest.finish_reason == "length"
    with LLM(package, generation_config="vllm", override_generation_config={"max_new_tokens": 5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=5)
    with LLM(package, override_generation_config={"temperature": 0.3}) as llm:  # over the model's own 0.5
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3, top_k=7)
    with pytest.raises(ConfigError, match=r"^override_generation_config: temperature must be a number, got 'hot'"):
        LLM(package, override_generation_config={"temperature": "hot"})


def test_a_priority_that_would_have_no_effect_is_refused(package: str) -> None:
    with LLM(package) as llm:
        assert len(llm.generate(["a", "b"], GREEDY, priority=[0, 0])) == 2
        with pytest.raises(InvalidRequestError, match="priority is 1: requests are served first come, first served"):
            llm.generate(["a", "b"], GREEDY, priority=[0, 1])
        with pytest.raises(InvalidRequestError, match="2 prompts but 1 priorities"):
            llm.generate(["a", "b"], GREEDY, priority=[0])


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ("x" * 512, {}, "512 tokens; max_model_len is 512"),
        ("x" * 2561, {}, "2561 bytes"),
        ([1, 320], {}, r"prompt_token_ids\[1\] is 320"),
        ([1, -1], {}, "is -1"),
        ([True, 1], {}, "True"),
        ({"prompt": "a", "prompt_token_ids": [1]}, {}, "either"),
        ({"text": "a"}, {}, "text"),
        ({"prompt": "a", "cache_salt": ""}, {}, "cache_salt"),
        ("a", {"logit_bias": {320: 1.0}}, r"logit_bias: token ids \[320\]"),
        ("a", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ("a", {"stop_token_ids": [999]}, "stop_token_ids"),
        ("a", {"logprobs": 21}, "max_logprobs=20"),
        ("a", {"prompt_logprobs": 21}, "max_logprobs=20"),
        ("a", {"n": 20000}, "16384"),
    ],
)
def test_what_is_refused_and_the_engine_goes_on(
    package: str, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with LLM(package) as llm:
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate([[65, 66], prompt], SamplingParams(**params))
        assert llm.get_stats()["kv_cache_usage"] == 0
        assert len(llm.generate([65, 66], GREEDY)[0].outputs[0].token_ids) == 24


def test_a_too_long_prompt_is_told_what_would_help(package: str) -> None:
    with LLM(package) as llm, pytest.raises(InvalidRequestError) as at_the_limit:
        llm.generate("x" * 512)
    assert str(at_the_limit.value) == (
        "the prompt has 512 tokens; max_model_len is 512, which is the model's own limit, and one position at least is "
        "needed for output: shorten the prompt"
    )
    with LLM(package, max_model_len=64) as llm, pytest.raises(InvalidRequestError) as below:
        llm.generate("x" * 64)
    assert str(below.value).endswith(
        "shorten the prompt, or raise max_model_len (to 512 at most, the model's own limit)"
    )


def test_a_huge_prompt_is_refused_before_it_is_tokenised(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "x" * 50_000_000
    encoded: list[str] = []
    with LLM(package) as llm:
        monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: encoded.append(text))
        with pytest.raises(InvalidRequestError, match="50000000 bytes, more than the 2560"):
            llm.generate(prompt, GREEDY)
        assert encoded == []


def test_warnings_reach_the_output(package: str) -> None:
    with LLM(package) as llm:
        (output,) = llm.generate("a", SamplingParams(temperature=0.001))
    assert "0.01 is used" in output.warnings[0]
