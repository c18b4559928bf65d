"""Input that is wrong in rarer ways: exit code 2, one clear line, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilore.planner.actor import build_actor
from hilore.planner.budget import BudgetError, parse_budget
from hilore.planner.sources import SourceError
from hilore.planner.spec import SpecError
from hilore.planner.tracefile import TraceFileError, load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.runtime.errors import PlanFileError, UnsupportedModelError
from hilore.runtime.planfile import load_plan
from tests.solver_fixtures import qwen_trace
from tests.specs import TINY_CONFIG, spec_of

NESTED = "[" * 100_000


def test_a_trace_with_an_infinite_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.trace.json"
    save_trace(qwen_trace(layers=2), path)
    text = path.read_text()
    assert '"delta_star": 0.01' in text
    path.write_text(text.replace('"delta_star": 0.01', '"delta_star": 1e999'))
    with pytest.raises(TraceFileError, match="1e999 is not a number that a trace can hold"):
        load_trace(path)


def test_a_trace_goes_into_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.trace.json"
    save_trace(qwen_trace(layers=2), path)
    assert load_trace(path) == qwen_trace(layers=2)


def test_files_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep"
    path.write_text(NESTED)
    with pytest.raises(TraceFileError, match="lists within lists"):
        load_trace(path)
    with pytest.raises(PlanFileError, match="lists within lists"):
        load_plan(path)
    with pytest.raises(SpecError, match="lists within lists"):
        spec_of(batch=NESTED)


@pytest.mark.parametrize("targets", ["[]", "nonsense"])
def test_targets_that_match_nothing_name_the_key(targets: str) -> None:
    spec = spec_of(adapter=f"{{kind: lora, targets: {targets}}}")
    with pytest.raises(SourceError, match=r"adapter\.targets: .* is refused by peft for Qwen2ForCausalLM"):
        build_actor(spec)


@pytest.mark.parametrize("size", ["vocab_size: 128", "hidden_size: 32"])
def test_sizes_that_no_tensor_has(size: str) -> None:
    key = size.partition(":")[0]
    with pytest.raises(SpecError, match=rf"model\.config\.{key} must be greater than 0, found -1"):
        spec_of(model=f"{{source: hf-config, config: {TINY_CONFIG.replace(size, f'{key}: -1')}}}")


def test_key_heads_divide_heads() -> None:
    config = TINY_CONFIG.replace("num_key_value_heads: 2", "num_key_value_heads: 3")
    with pytest.raises(SpecError, match="num_key_value_heads 3 does not divide num_attention_heads 4"):
        spec_of(model=f"{{source: hf-config, config: {config}}}")


def test_rotary_embeddings_need_even_heads() -> None:
    config = TINY_CONFIG.replace("hidden_size: 32", "hidden_size: 36")
    with pytest.raises(SpecError, match=r"each head 9 channels .hidden_size 36, num_attention_heads 4.; rotary"):
        spec_of(model=f"{{source: hf-config, config: {config}}}")


def test_little_memory_in_a_unit_that_people_disagree_on_is_not_rounded_to_nothing() -> None:
    with pytest.raises(BudgetError, match=r"write 1MiB for powers of 1024 \(1 MiB\), or 0\.95 for powers of 1000"):
        parse_budget("1MB")


def test_a_bucket_that_holds_no_prompt_and_completion() -> None:
    with pytest.raises(SpecError, match="begins with 1 tokens; a row of prompt and completion has 2 or more"):
        spec_of(batch="{microbatch: 1, prompt_tokens: 8, response_tokens: 8, length_buckets: [1, 16]}")


def test_blocks_that_get_their_input_by_keyword_are_no_regions() -> None:
    with pytest.raises(UnsupportedModelError, match=r"by keyword.*set region_grain: layer"):
        trace_spec(spec_of(region_grain="block"))
