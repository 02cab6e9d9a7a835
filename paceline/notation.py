"""The notation of strategies, codecs and cuts: turns text into objects, and back.

The notation of an object is the Python call that makes it, such as `AllReduce(via="ring")`. `repr`
of the object gives it back. It has calls, names and literals. It is parsed with `ast`, and never
evaluated.

    text --> syntax tree --> `NotationCall`s --> arguments checked --> object

A codec becomes a word where it is defined (`codec/words.py`), a strategy by its line in
`STRATEGY_WORDS`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import accumulate
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from paceline.cluster.launcher import isolation
from paceline.codec.words import codec_words
from paceline.errors import NotationError, PacelineError, UsageError
from paceline.formatting import format_as_call, format_choices, format_count
from paceline.removed import refuse_removed_options

Vocabulary = Mapping[str, "str | Callable[..., Any]"]

# The function or class that each word calls. "module:name" is imported when the word is used, so
# that a text can be checked without torch.
STRATEGY_WORDS: Final[Mapping[str, str]] = {
    "AllReduce": "paceline.sync.allreduce:AllReduce",
    "LocalSGD": "paceline.sync.localsgd.strategy:LocalSGD",
    "adaptive": "paceline.sync.localsgd.fragment:adaptive",
    "Sequence": "paceline.sync.per_axis:Sequence",
    "Gossip": "paceline.sync.gossip.strategy:Gossip",
    "ParameterServer": "paceline.servers.worker.strategy:ParameterServer",
    **{word: f"paceline.sync.localsgd.outer:{word}" for word in ("average", "nesterov")},
}

# Words of cuts. They are a vocabulary of their own: `--cut 'shard("blocks.*")'`.
CUT_WORDS: Final[Mapping[str, str]] = {
    "tensor": "paceline.parallel.tensor.tensor_cut:tensor",
    **{
        word: f"paceline.parallel.tensor.styles:{word}"
        for word in ("column", "row", "vocab", "sequence", "summed")
    },
    "shard": "paceline.parallel.shard:shard",
    "pipeline": "paceline.parallel.pipeline:pipeline",
    "layers": "paceline.parallel.layers:layers",
}


class _LazyVocabulary(Mapping[str, str]):
    """Words of strategies and codecs.

    Codecs are searched for when a text has one for the first time, not when a process starts.
    """

    def __getitem__(self, word: str) -> str:
        return STRATEGY_WORDS[word] if word in STRATEGY_WORDS else codec_words()[word]

    def __iter__(self) -> Iterator[str]:
        return iter({**STRATEGY_WORDS, **codec_words()})

    def __len__(self) -> int:
        return len({**STRATEGY_WORDS, **codec_words()})


VOCABULARY: Final[Vocabulary] = _LazyVocabulary()

# Names that stand for numbers: repr(math.inf) is "inf".
NAMED_NUMBERS: Final = {"inf": math.inf}

MAX_CHARACTERS: Final = 20_000  # characters of a text
MAX_BRACKET_DEPTH: Final = 50  # levels of nested brackets
INTEGER_LIMIT: Final = 1 << 63  # whole numbers have to be smaller

# Kinds of literals, in the words of messages.
_KIND_WORDS: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
}


@dataclass(frozen=True)
class NotationCall:
    """A call that was read from a part of `source`, and not carried out yet."""

    word: str
    positional: tuple[Any, ...]
    named: dict[str, Any]
    node: ast.expr
    source: str

    @property
    def source_text(self) -> str:
        """Text of the call, as in the source."""
        return _quote_node(self.node, self.source)


def parse_notation(text: str, vocabulary: Vocabulary = VOCABULARY) -> Any:
    """Make the object that a text describes.

    Args:
        text: The notation of the object.
        vocabulary: Words that the text may use. Default: strategies and codecs.

    Raises:
        NotationError: The text can't be read, or its arguments don't fit. The message has the value
            found, the values possible, and what to do.
    """
    return _make_object(_read_node(_parse_syntax(text, vocabulary), text, vocabulary), vocabulary)


def check_notation(text: str, vocabulary: Vocabulary = VOCABULARY) -> None:
    """Raise `NotationError` if a text isn't notation, or has an unknown word.

    Imports nothing, and so doesn't check arguments.
    """
    _read_node(_parse_syntax(text, vocabulary), text, vocabulary)


def parse_strategy(text: str) -> Any:
    """Make the strategy that a text describes.

    Raises as `parse_notation` does, and for any other object, such as a codec alone.
    """
    result = parse_notation(text)
    # A strategy is known by its method, as its protocol would need torch.
    if not hasattr(result, "begin"):
        raise NotationError(
            f"{_shorten_text(text)} is not a strategy; write one such as AllReduce(via='ring') or "
            "AllReduce(codec=int8())"
        )
    return result


def parse_cuts(text: str) -> tuple[Any, ...]:
    """Make the cuts that a text describes, one or several with commas between them.

    Raises as `parse_notation` does.
    """
    result = parse_notation(text, CUT_WORDS)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def verify_strategy(text: str) -> None:
    """Raise `NotationError` or `UsageError` if a text makes no strategy. Arguments are checked.

    This process doesn't import torch for it: another process makes the strategy.
    """
    check_notation(text)
    _verify_in_fork(parse_strategy, text)


def verify_cuts(text: str) -> None:
    """Raise `NotationError` or `UsageError` if a text makes no cuts.

    As `verify_strategy` does for strategies.
    """
    check_notation(text, CUT_WORDS)
    _verify_in_fork(parse_cuts, text)


def parse_shares(text: str, workers: int | None = None) -> Literal["auto"] | tuple[float, ...]:
    """Parse shares of a batch: "auto", or one number per worker.

    The numbers are counted if the number of workers is given. Raises `NotationError`.
    """
    if text.strip() == "auto":
        return "auto"
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise NotationError(
            f"--shares {text} can't be read: say auto, or one number per worker, such as 2,1"
        ) from None
    if not all(0 <= share < math.inf for share in numbers) or not any(numbers):
        raise NotationError(
            f"--shares {text}: each is a number, zero or more, and at least one is above zero"
        )
    if workers not in (None, len(numbers)):
        counts = (
            f"{format_count(len(numbers), 'number')} for {format_count(workers or 0, 'worker')}"
        )
        raise NotationError(
            f"--shares {text} has {counts}: give one number per worker, in rank order"
        )
    return numbers


def _verify_in_fork(make: Callable[[str], Any], text: str) -> None:
    """Make an object only to see errors: here if torch is imported already, else in a fork."""
    if "torch" in sys.modules:
        make(text)
        return
    try:
        isolation.attempt_in_copy(partial(make, text))
    except isolation.AttemptFailed as refused:
        raise (NotationError if refused.kind == NotationError.__name__ else UsageError)(
            str(refused)
        ) from None


def format_notation(obj: object, vocabulary: Vocabulary = VOCABULARY) -> str:
    """Format the notation of an object, which `parse_notation` reads back.

    Raises `NotationError` if the object has none.
    """
    written = format_as_call(obj)
    if "no notation>" in written:
        raise NotationError(
            f"{written} can't be written as text: Python functions have none. "
            "Give the object to pl.start(sync=...)"
        )
    check_notation(written, vocabulary)
    return written


def _parse_syntax(text: str, vocabulary: Vocabulary) -> ast.expr:
    """Parse a text with Python's parser, within limits on its size."""
    # Limits first: Python's parser would use up the stack on a hostile text.
    depth = max(
        accumulate((sign in "([{") - (sign in ")]}") for sign in text[:MAX_CHARACTERS]), default=0
    )
    if len(text) > MAX_CHARACTERS or depth > MAX_BRACKET_DEPTH:
        size = (
            f"{len(text):,} characters"
            if len(text) > MAX_CHARACTERS
            else f"{depth} levels of brackets"
        )
        raise NotationError(
            f"{_shorten_text(text)} can't be read: it has {size}, and may have {MAX_CHARACTERS:,} "
            "characters "
            f"and {MAX_BRACKET_DEPTH} levels of brackets. Make such a large object in Python"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        example = (
            "AllReduce(via='ring')"
            if vocabulary is VOCABULARY
            else f"{min(vocabulary, default='name')}(...)"
        )
        raise NotationError(
            f"{_shorten_text(text)} can't be read: {reason}. Write it as in Python, for example "
            f"{example}"
        ) from None
    return tree.body


def _read_node(node: ast.expr, text: str, vocabulary: Vocabulary) -> Any:
    """Read a literal as its value, and a call as a `NotationCall`. Refuse any other syntax."""
    match node:
        case ast.Constant(value=int(value)) if value >= INTEGER_LIMIT:
            raise NotationError(
                f"{_shorten_text(hex(value), 20)} in {_shorten_text(text)} is too large a number: "
                "give one below 2 ** 63"
            )
        case ast.Constant(value=value) if value is None or isinstance(
            value, bool | int | float | str
        ):
            return value
        # Signs before numbers. -True would be a number in Python, and is refused.
        case ast.UnaryOp(
            op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant() | ast.Name() as operand
        ):
            value = _read_node(operand, text, vocabulary)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value if isinstance(sign, ast.USub) else value
        case ast.Tuple(elts=items):
            return tuple(_read_node(item, text, vocabulary) for item in items)
        case ast.List(elts=items):
            return [_read_node(item, text, vocabulary) for item in items]
        # Dicts belong to cuts alone: styles by the names of modules.
        case ast.Dict(keys=[*keys], values=values) if vocabulary is CUT_WORDS and all(
            isinstance(key, ast.Constant) for key in keys
        ):
            read = partial(_read_node, text=text, vocabulary=vocabulary)
            return {
                read(key): read(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.Name(id=word) if word in NAMED_NUMBERS:
            return NAMED_NUMBERS[word]
        case ast.Name(id=word):
            _check_word(word, vocabulary)
            raise NotationError(
                f"{word} stands alone in {_shorten_text(text)}: write it as a call, {word}(...)"
            )
        case ast.Call(func=ast.Name(id=word)):
            return _read_call(node, word, text, vocabulary)
        case ast.Call(func=ast.Attribute(attr=word)) if word in vocabulary:
            raise NotationError(
                f"{_quote_node(node.func, text)} has a module before it: "
                f"leave it out and write {word}(...)"
            )
    raise NotationError(
        f"{_quote_node(node, text)} in {_shorten_text(text)} is not part of the notation, which "
        "has calls, "
        "names, numbers, strings, True, False,"
        " None, tuples and lists. Make any other object in Python"
        + (" and give it to pl.start(sync=...)" if vocabulary is VOCABULARY else "")
    )


def _read_call(node: ast.Call, word: str, text: str, vocabulary: Vocabulary) -> NotationCall:
    """Read a call with its arguments, without carrying it out."""
    _check_word(word, vocabulary)
    if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    ):
        raise NotationError(
            f"{_quote_node(node, text)} has * or **, which the notation doesn't have: "
            "write the arguments out"
        )
    twice = {
        name
        for name, count in Counter(keyword.arg for keyword in node.keywords).items()
        if count > 1
    }
    if twice:
        raise NotationError(
            f"{_quote_node(node, text)} gives {', '.join(sorted(map(str, twice)))} twice: "
            "leave one out"
        )
    positional = tuple(_read_node(argument, text, vocabulary) for argument in node.args)
    named = {
        keyword.arg or "": _read_node(keyword.value, text, vocabulary) for keyword in node.keywords
    }
    return NotationCall(word, positional, named, node, text)


def _check_word(word: str, vocabulary: Vocabulary) -> None:
    """Raise `NotationError` if a word isn't in the vocabulary."""
    if word not in vocabulary:
        raise NotationError(
            f"{word} is not a word of the notation; {format_choices(word, vocabulary)}"
        )


def _make_object(node: Any, vocabulary: Vocabulary) -> Any:
    """Make the object of a node that was read, from the innermost call outwards."""
    if isinstance(node, tuple | list):
        return type(node)(_make_object(item, vocabulary) for item in node)
    if isinstance(node, dict):
        return {key: _make_object(value, vocabulary) for key, value in node.items()}
    if not isinstance(node, NotationCall):
        return node
    maker = _import_maker(node.word, vocabulary)
    # Names and number of arguments first: their values may be costly to make.
    _check_arguments(node, maker)
    positional = [_make_object(item, vocabulary) for item in node.positional]
    named = {name: _make_object(item, vocabulary) for name, item in node.named.items()}
    # Kinds only of strategies and codecs: cuts check theirs themselves.
    if vocabulary is VOCABULARY:
        for name, value in inspect.signature(maker).bind(*positional, **named).arguments.items():
            _check_kind(node, maker, name, value)
    # Errors of paceline have good messages already. Others become a `NotationError`.
    try:
        return maker(*positional, **named)
    except PacelineError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise NotationError(f"{node.source_text} can't be made: {error}") from error


def _import_maker(word: str, vocabulary: Vocabulary) -> Callable[..., Any]:
    """Import the function or class that a word calls."""
    entry = vocabulary[word]
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        maker: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return maker
    return entry


def _check_arguments(node: NotationCall, maker: Callable[..., Any]) -> None:
    """Raise if `maker` doesn't take these arguments."""
    refuse_removed_options(maker, node.named)
    signature = inspect.signature(maker)
    parameters = signature.parameters.values()
    possible = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for name in node.named:
            if name not in possible:
                raise NotationError(
                    f"{node.word} has no argument {name} (in {node.source_text}); "
                    f"{format_choices(name, possible)}"
                )
    try:
        signature.bind(*node.positional, **node.named)
    except TypeError as error:
        wanted = f"{node.word}({', '.join(signature.parameters)})"
        raise NotationError(f"{node.source_text} doesn't fit {wanted}: {error}") from None


def _check_kind(node: NotationCall, maker: Callable[..., Any], name: str, value: Any) -> None:
    """Raise if the kind of a value differs from the annotation of its argument."""
    # For a dataclass, the hints of the class itself: its generated `__init__` can't resolve names
    # of a base's module.
    plain_class = isinstance(maker, type) and not is_dataclass(maker)
    kinds = get_type_hints(maker.__init__ if plain_class else maker)
    wanted = kinds.get(name, Any)
    if not _fits_kind(value, wanted):
        raise NotationError(
            f"{name} is {_shorten_text(format_as_call(value))} in {node.source_text}, and has to "
            f"be {_describe_kind(wanted)}"
        )


def _fits_kind(value: Any, kind: Any) -> bool:
    """Whether a value fits an annotation, as far as can be told.

    The items of a tuple aren't checked. Of a protocol, only the names of its members are.
    """
    members = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits_kind(value, member) for member in members)
    if get_origin(kind) is Literal:
        # The type alone: the maker has the better message for an unknown choice.
        return isinstance(value, tuple({type(member) for member in members}))
    if kind in _KIND_WORDS:
        accepted = (int, float) if kind is float else kind
        return isinstance(value, accepted) and not (
            isinstance(value, bool) and kind in (int, float)
        )
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    if get_origin(kind) is tuple or kind is Any:
        return True
    # A protocol: any object made by a call that has all of its members.
    names = (
        [name for name in vars(kind) if not name.startswith("_")] if isinstance(kind, type) else []
    )
    return type(value) not in (*_KIND_WORDS, tuple, list) and all(
        hasattr(value, name) for name in names
    )


def _describe_kind(kind: Any) -> str:
    """Describe an annotation in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe_kind(part) for part in get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _KIND_WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def _quote_node(node: ast.expr, text: str) -> str:
    """Quote a node as it is written in the text."""
    return _shorten_text(ast.get_source_segment(text.strip(), node) or ast.unparse(node))


def _shorten_text(text: str, limit: int = 80) -> str:
    """Shorten a text to one line of limited length, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."
