"""The literal text of every vocabulary id."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>$")


def token_texts(tokenizer: Any, d_vocab: int) -> list[str]:
    """Return what each id stands for in running text.

    Byte-level tokens ("Ġthe", "Ċ") become the text of their bytes, sentencepiece tokens ("▁x",
    "<0x0A>") lose their marks, WordPiece tokens ("##ing") are put together again with a space
    before each word. Bytes that are no text by themselves stay as ``<0xE6>``; special tokens
    stay as they are.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    d_vocab : int
        Rows of the model's embedding; ids that the tokenizer does not know are ``<123>``.

    Returns
    -------
    list of str
        Of length `d_vocab`.
    """
    size = min(len(tokenizer), d_vocab)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    kind = _kind(tokenizer, tokens)
    texts = [
        f"<{number}>" if token is None else str(token) if number in special else kind(str(token))
        for number, token in enumerate(tokens)
    ]
    return texts + [f"<{number}>" for number in range(size, d_vocab)]


def _kind(tokenizer: Any, tokens: list[str | None]) -> Any:
    """Choose how tokens are written, from the tokenizer's own decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        written = json.dumps([parts.get("decoder"), parts.get("pre_tokenizer")])
        if "ByteLevel" in written:
            return _from_bytes
        if (parts.get("model") or {}).get("type") == "WordPiece" or "WordPiece" in written:
            return _from_wordpiece
        if "Metaspace" in written or "▁" in written or "ByteFallback" in written:
            return _from_sentencepiece
    known = [token for token in tokens if token]
    if any(token.startswith("Ġ") for token in known):
        return _from_bytes
    if any(token.startswith("##") for token in known):
        return _from_wordpiece
    return _from_sentencepiece


def _from_bytes(token: str) -> str:
    table = _byte_of_character()
    if any(character not in table for character in token):
        return token
    return _decode(bytes(table[character] for character in token))


def _from_sentencepiece(token: str) -> str:
    match = _BYTE_TOKEN.match(token)
    if match:
        return _decode(bytes([int(match[1], 16)]))
    return token.replace("▁", " ")


def _from_wordpiece(token: str) -> str:
    if token.startswith("##"):
        return token[2:]
    # Punctuation follows the word before it, as in text.
    return f" {token}" if any(character.isalnum() for character in token) else token


def _decode(raw: bytes) -> str:
    """Decode UTF-8, with bytes that are no text by themselves written as <0xE6>."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        head, bad, tail = raw[: error.start], raw[error.start : error.end], raw[error.end :]
        return head.decode("utf-8") + "".join(f"<0x{b:02X}>" for b in bad) + _decode(tail)


@cache
def _byte_of_character() -> dict[str, int]:
    """Invert GPT-2's table: printable bytes stand for themselves, the rest start at U+0100.

    References
    ----------
    ``bytes_to_unicode`` in OpenAI's encoder.py for GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
