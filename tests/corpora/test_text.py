"""Texts and text files: encoding, BOS, empty and over-long prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.corpora import CorpusSpec, Prompts, as_corpus, load_prompts
from attnlens.errors import CorpusError, UsageError

from .conftest import facts_of, words


def load(value: Any, tokenizer: Any, facts: Any, **fields: Any) -> Prompts:
    return load_prompts(as_corpus(value, **fields), tokenizer=tokenizer, facts=facts)


def ids(prompts: Prompts) -> list[list[int]]:
    return [p.tolist() for p in prompts.tokens]


def test_each_text_is_one_prompt_in_order_with_bos_once(word_tokenizer: Any, tiny: Any) -> None:
    prompts = load(["w3 w4", "w0"], word_tokenizer, tiny)
    assert ids(prompts) == [[41, 4, 5], [41, 1]]
    assert prompts.bos == "prepended"
    assert prompts.notes == ()
    assert all(p.dtype == np.int32 for p in prompts.tokens)


def test_bos_that_the_text_spells_out_is_not_doubled(word_tokenizer: Any, tiny: Any) -> None:
    assert ids(load(["<s> w3", "<s>"], word_tokenizer, tiny)) == [[41, 4], [41]]


def test_bos_that_the_tokenizer_adds_by_itself_is_not_doubled(
    demo_tokenizer: Any, demo: Any
) -> None:
    assert demo_tokenizer("abc")["input_ids"][0] == demo_tokenizer.bos_token_id
    (tokens,) = ids(load("abc", demo_tokenizer, demo))
    assert tokens.count(0) == 1 and tokens[0] == 0


class Stubborn:
    """Adds BOS whatever it is asked, as some tokenizers do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [41, *self.inner(text, **options)["input_ids"]]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(("bos", "expected"), [(None, [41, 4, 5]), (False, [4, 5])])
def test_a_tokenizer_that_always_adds_bos(
    word_tokenizer: Any, tiny: Any, bos: bool | None, expected: list[int]
) -> None:
    assert ids(load("w3 w4", Stubborn(word_tokenizer), tiny, bos=bos)) == [expected]


def test_bos_can_be_left_out(word_tokenizer: Any, tiny: Any) -> None:
    prompts = load("w3 w4", word_tokenizer, tiny, bos=False)
    assert ids(prompts) == [[4, 5]] and prompts.bos == "absent"


def test_tokenizer_without_bos(tiny: Any) -> None:
    prompts = load("w3", words(None), tiny)
    assert ids(prompts) == [[4]] and prompts.bos == "absent"
    with pytest.raises(CorpusError, match="BOS was asked for"):
        load("w3", words(None), tiny, bos=True)


def test_bos_outside_the_models_vocabulary_is_left_out_and_said() -> None:
    facts = facts_of(d_vocab=41)
    prompts = load("w3", words(), facts)
    assert ids(prompts) == [[4]] and prompts.bos == "absent"
    assert "outside the model's vocabulary of 41" in prompts.notes[0]
    with pytest.raises(CorpusError):
        load("w3", words(), facts, bos=True)


def test_bert_gets_its_own_special_tokens(bert_tokenizer: Any) -> None:
    facts = facts_of(causal=False)
    assert ids(load(["w3 w4", "[CLS] w3 [SEP]"], bert_tokenizer, facts)) == [
        [42, 4, 5, 41],
        [42, 4, 41],
    ]
    assert ids(load("w3 w4", bert_tokenizer, facts, bos=False)) == [[4, 5]]


def test_over_long_prompts_are_cut_and_said(word_tokenizer: Any, tiny: Any) -> None:
    prompts = load([" ".join(["w1"] * 40), "w2"], word_tokenizer, tiny)
    assert prompts.lengths == (16, 2)
    assert prompts.notes == ("1 of 2 prompts had more than 16 tokens and was cut to 16.",)


def test_length_cuts_prompts_and_bert_keeps_its_end(bert_tokenizer: Any) -> None:
    prompts = load("w1 w2 w3 w4 w5", bert_tokenizer, facts_of(causal=False), length=4)
    assert ids(prompts) == [[42, 2, 3, 41]]


def test_length_beyond_the_context_is_said(word_tokenizer: Any, tiny: Any) -> None:
    prompts = load(" ".join(["w1"] * 40), word_tokenizer, tiny, length=64)
    assert prompts.lengths == (16,)
    assert "64 tokens are more than the model's context of 16" in prompts.notes[0]


def test_a_length_without_room_for_text_is_refused(word_tokenizer: Any, tiny: Any) -> None:
    with pytest.raises(CorpusError, match="no room") as caught:
        load("w1", word_tokenizer, tiny, length=1)
    assert "length of 2" in str(caught.value.hint)
    assert ids(load("w1 w2", word_tokenizer, tiny, length=1, bos=False)) == [[2]]


def test_one_token_prompts_are_prompts(word_tokenizer: Any, tiny: Any) -> None:
    assert load("w1", word_tokenizer, tiny, bos=False).lengths == (1,)


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_empty_text_is_refused(word_tokenizer: Any, tiny: Any, text: str) -> None:
    with pytest.raises(CorpusError, match="Text 2 is empty"):
        load(["w1", text], word_tokenizer, tiny)


def test_a_text_of_blanks_with_tokens_is_a_prompt(demo_tokenizer: Any, demo: Any) -> None:
    assert load("  ", demo_tokenizer, demo).lengths[0] > 1


def test_half_a_character_is_refused(demo_tokenizer: Any, demo: Any) -> None:
    with pytest.raises(CorpusError, match="not valid Unicode"):
        load("ab\udcff", demo_tokenizer, demo)


def test_text_without_tokenizer_points_to_tokens(tiny: Any) -> None:
    for value in ("w1", Path("x.txt"), None):
        with pytest.raises(CorpusError, match="no tokenizer") as caught:
            load(value, None, tiny)
        assert "--tokens" in str(caught.value.hint)
        assert caught.value.exit_code == 2


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"token 31, which is outside .* of 20"):
        load("w3 w30", words(None), facts_of(d_vocab=20))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.booleans())
def test_any_unicode_encodes_and_decodes(demo_tokenizer: Any, texts: list[str], bos: bool) -> None:
    facts = facts_of(n_ctx=4096, d_vocab=512)
    texts = [t.encode("utf-8", "replace").decode() for t in texts]
    prompts = load(texts, demo_tokenizer, facts, bos=bos)
    for text, tokens in zip(texts, prompts.tokens, strict=True):
        assert tokens.min() >= 0 and tokens.max() < 512
        assert demo_tokenizer.decode(tokens[1:] if bos else tokens) == text


# --- files ---


def written(tmp_path: Path, content: bytes, name: str = "prompts.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_one_prompt_a_line(tmp_path: Path, word_tokenizer: Any, tiny: Any, end: bytes) -> None:
    path = written(tmp_path, end.join([b"w1 w2", b"", b"w3", b"  ", b"w4"]))
    prompts = load(path, word_tokenizer, tiny)
    assert ids(prompts) == [[41, 2, 3], [41, 4], [41, 5]]
    assert prompts.notes == ("2 empty lines skipped.",)


def test_byte_order_mark_is_dropped(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = written(tmp_path, b"\xef\xbb\xbfw1\nw2\n")
    assert ids(load(path, word_tokenizer, tiny)) == [[41, 2], [41, 3]]


def test_only_line_ends_end_lines(tmp_path: Path, demo_tokenizer: Any, demo: Any) -> None:
    path = written(tmp_path, "a\u2028b\x0bc\x1cd".encode())
    prompts = load(path, demo_tokenizer, demo)
    assert len(prompts) == 1
    assert demo_tokenizer.decode(prompts.tokens[0][1:]) == "a\u2028b\x0bc\x1cd"


def test_a_path_that_is_not_ascii(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    folder = tmp_path / "dir with space ü東"
    folder.mkdir()
    assert len(load(written(folder, b"w1"), word_tokenizer, tiny)) == 1


@pytest.mark.parametrize("before", [0, 5, 9_000, (1 << 20) - 1, 3_000_000])
def test_wrong_encoding_names_the_byte(
    tmp_path: Path, word_tokenizer: Any, tiny: Any, before: int
) -> None:
    path = written(tmp_path, b"x" * before + "é".encode("latin-1") + b" w1")
    with pytest.raises(CorpusError, match=rf"byte 0xe9 at offset {before}\b") as caught:
        load(path, word_tokenizer, tiny)
    assert "iconv -f WINDOWS-1252 -t UTF-8" in str(caught.value.hint)


def test_wrong_encoding_behind_a_split_character(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    # The three bytes of one character lie across the boundary of the blocks that are searched.
    path = written(tmp_path, b"x" * ((1 << 20) - 1) + "東".encode() + b"\xff")
    with pytest.raises(CorpusError, match=rf"byte 0xff at offset {(1 << 20) + 2}\b"):
        load(path, word_tokenizer, tiny)


def test_a_character_cut_off_at_the_end(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = written(tmp_path, b"w1 " + "東".encode()[:2])
    with pytest.raises(CorpusError, match="byte 0xe6 at offset 3"):
        load(path, word_tokenizer, tiny)


def test_utf16_is_recognised(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = written(tmp_path, "w1".encode("utf-16"))
    with pytest.raises(CorpusError, match="at offset 0") as caught:
        load(path, word_tokenizer, tiny)
    assert "iconv -f UTF-16" in str(caught.value.hint)


def test_missing_file_and_folder(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(CorpusError, match="cannot be read"):
            load(path, word_tokenizer, tiny)


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_file_without_text_is_refused(
    tmp_path: Path, demo_tokenizer: Any, demo: Any, content: bytes, chunk: int | None
) -> None:
    with pytest.raises(CorpusError, match="no prompts"):
        load(written(tmp_path, content), demo_tokenizer, demo, chunk=chunk)


def test_lines_of_blanks_are_empty_even_where_blanks_are_tokens(
    tmp_path: Path, demo_tokenizer: Any, demo: Any
) -> None:
    prompts = load(written(tmp_path, b"a\n  \n\t\nb\n"), demo_tokenizer, demo)
    assert len(prompts) == 2 and prompts.notes == ("2 empty lines skipped.",)


def test_samples_takes_the_first_and_says_when_there_are_fewer(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    path = written(tmp_path, b"w1\n\nw2\nw3\n")
    assert ids(load(path, word_tokenizer, tiny, samples=2)) == [[41, 2], [41, 3]]
    assert "9 prompts were asked for; there are 3." in (
        load(path, word_tokenizer, tiny, samples=9).notes
    )


# --- running text ---


def test_running_text_is_cut_into_equal_prompts(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    path = written(tmp_path, b"w1 w2 w3\nw4\n\nw5 w6 w7 w8")
    prompts = load(path, word_tokenizer, tiny, chunk=4)
    assert ids(prompts) == [[41, 2, 3, 4], [41, 5, 6, 7]]
    assert prompts.notes == ("The last 2 tokens fill no prompt and were left out.",)


@pytest.mark.parametrize("samples", [1, 3, 50])
def test_running_text_with_samples_is_the_beginning(
    tmp_path: Path, demo_tokenizer: Any, demo: Any, samples: int
) -> None:
    from attnlens.demo import TEXT_FILE

    path = written(tmp_path, TEXT_FILE.read_bytes()[:20_000])
    every = load(path, demo_tokenizer, demo, chunk=64)
    some = load(path, demo_tokenizer, demo, chunk=64, samples=samples)
    assert ids(some) == ids(every)[:samples]


def test_running_text_reads_on_where_tokens_are_long(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    # 100 characters per token: far more than the first guess of what to read.
    line = "w1" + " " * 98
    path = written(tmp_path, "\n".join([line] * 100).encode())
    prompts = load(path, word_tokenizer, tiny, chunk=5, samples=10)
    assert prompts.lengths == (5,) * 10


@pytest.mark.parametrize("kind", ["text", "file"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_corpus_of_one_word(  # TransformerLens#707, #1139
    tmp_path: Path, word_tokenizer: Any, tiny: Any, kind: str, chunk: int | None
) -> None:
    value: Any = "w1" if kind == "text" else written(tmp_path, b"w1")
    prompts = load(value, word_tokenizer, tiny, chunk=chunk)
    assert ids(prompts) == [[41, 2]]


def test_chunk_and_length_must_agree() -> None:
    with pytest.raises(UsageError, match="chunk is 4 and length is 5"):
        CorpusSpec("file", source="x", chunk=4, length=5)


# --- the bundled text ---


def test_bundled_text(demo_tokenizer: Any, demo: Any) -> None:
    prompts = load(None, demo_tokenizer, demo)
    assert prompts.lengths == (128,) * 32
    assert all(p[0] == 0 and (p[1:] != 0).all() for p in prompts.tokens)
    assert len({p.tobytes() for p in prompts.tokens}) == 32


def test_bundled_text_by_samples_length_and_seed(demo_tokenizer: Any, demo: Any) -> None:
    few = load(None, demo_tokenizer, demo, samples=3, length=20)
    more = load(None, demo_tokenizer, demo, samples=7, length=20)
    assert few.lengths == (20,) * 3
    assert ids(more)[:3] == ids(few)
    assert ids(load(None, demo_tokenizer, demo, samples=3, length=20, seed=1)) != ids(few)
    assert load(None, demo_tokenizer, demo, samples=3, length=20).hash == few.hash


def test_bundled_text_fits_a_short_context(word_tokenizer: Any, tiny: Any) -> None:
    prompts = load(None, word_tokenizer, tiny)
    assert prompts.lengths == (16,) * 32 and prompts.notes == ()


def test_bundled_text_ends(demo_tokenizer: Any, demo: Any) -> None:
    prompts = load(None, demo_tokenizer, demo, samples=10_000, length=256)
    assert 100 < len(prompts) < 10_000
    assert f"there are {len(prompts)}" in prompts.notes[0]
