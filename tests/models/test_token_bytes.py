"""The text of sampled tokens is read off the tokens, byte by byte."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sensorium.models.rendering import BYTE_OF, TokenTable
from sensorium.vocabulary.errors import ModelError

from .stock_pair import Pair

Pairs = Callable[..., Pair]


@pytest.fixture(scope="module")
def table(pairs: Pairs) -> TokenTable:
    policy = pairs("qwen2_5_vl").policy
    return TokenTable(policy.chat.tokenizer, policy.vocab_size)


def test_the_byte_table_is_the_one_of_byte_level_bpe() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_a_given_answer_reads_back_with_the_end_of_every_token(pairs: Pairs, text: str) -> None:
    policy = pairs("qwen2_5_vl").policy
    answer = policy.chat.respond(text, "a")
    normal = policy.chat.tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert answer.text == normal
    assert answer.byte_ends[-1] == len(normal.encode())
    assert list(answer.byte_ends) == sorted(answer.byte_ends)
    assert len(answer.byte_ends) == len(answer.tokens) == len(answer.logprobs) == len(answer.sampled_logprobs)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_sampled_tokens_have_text_and_ends_within_it(pairs: Pairs, data: st.DataObject) -> None:
    policy = pairs("qwen2_5_vl").policy
    tokens = data.draw(st.lists(st.integers(0, policy.vocab_size - 1), max_size=20))
    segment = policy.chat.written(tokens, [0.0] * len(tokens), [0.0] * len(tokens), "a")
    raw = b"".join(policy.chat.token_bytes(token) for token in tokens)
    assert segment.text == raw.decode(errors="replace")
    assert list(segment.byte_ends) == sorted(segment.byte_ends)
    assert (segment.byte_ends or (0,))[-1] == len(segment.text.encode())


def test_broken_utf8_moves_the_ends_of_later_tokens(table: TokenTable) -> None:
    first, second = "é".encode()
    by_bytes = {table.bytes_of(token): token for token in range(448)}
    lone, tail, letter = by_bytes[bytes([first])], by_bytes[bytes([second])], by_bytes[b"a"]
    assert table.read([lone, tail, letter]) == ("éa", (1, 2, 3))
    assert table.read([letter, lone, letter]) == ("a\ufffda", (1, 4, 5))


def test_a_written_segment_carries_the_version_it_is_given(pairs: Pairs) -> None:
    assert pairs("qwen2").policy.chat.written([300], [-1.0], [-0.5], "x", 3).policy_version == 3


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="byte-level"):
        TokenTable(PreTrainedTokenizerFast(tokenizer_object=core), 2)
