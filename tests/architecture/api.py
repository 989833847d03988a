"""The page of the public names: signatures and texts as they are written in the code."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

import nexar
from nexar.arrays.compression.base import Terms
from nexar.arrays.compression.quantized import BlockQuantizer
from nexar.cluster.membership import Member
from nexar.collectives.statistics import Straggler
from nexar.communicator.collective_methods import CollectiveMethods
from nexar.communicator.elastic_methods import Checkpoint, ElasticMethods
from nexar.communicator.events import Subscription
from nexar.communicator.message_methods import MessageMethods
from nexar.communicator.point_to_point import MessageInfo, Source
from nexar.communicator.recovery_methods import RecoveryMethods
from nexar.communicator.request import Request, wait_all
from nexar.communicator.rpc_methods import Remote, RpcCallMethods, RpcServeMethods
from nexar.communicator.status import Health
from nexar.types import AwaitedPeer
from tests.architecture.docstrings import fields_of, text_of

_WIDTH = 118
_TOGETHER = "\N{NO-BREAK SPACE}"
_INTRODUCTION = """Reached as `nexar.NAME`. Errors have a page of their own, [errors](errors.md), and so have the
settings that `nexar.Config` and every `**settings` take: [configuration](configuration.md). Every verb of a
communicator is also one of `comm.start`, which returns a `Request` at once."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_FOR_THE_FEED = {"begin", "put", "end", "join"}  # a subscription's other side
_MENTIONED = "See "  # so begins what a method says of itself that is described elsewhere


def api(made: str) -> str:
    """The whole page. `made` says where it comes from."""
    parts = ["# The public names", made, _INTRODUCTION, *_constants(), *_functions(), *_classes()]
    return "\n\n".join(parts) + "\n"


def _constants() -> Iterator[str]:
    yield "## Constants"
    body = ast.parse(inspect.getsource(inspect.getmodule(AwaitedPeer))).body  # type: ignore[arg-type]
    fields = dict(fields_of(body))
    yield "\n".join(f"- `{name}`: {fields[name]}" for name in ("ANY_SOURCE", "ANY_TAG"))


def _functions() -> Iterator[str]:
    yield "## Functions"
    for function in (nexar.init, nexar.connect, nexar.local, nexar.spawn, wait_all):
        yield _described(_definition(function))


def _classes() -> Iterator[str]:
    verbs = {
        name for base in (MessageMethods, CollectiveMethods, RpcCallMethods, RpcServeMethods) for name in vars(base)
    }
    yield from _class("Communicator", nexar.Communicator, but=verbs)
    yield from _class("Communicator: messages", MessageMethods)
    yield from _class("Communicator: collectives", CollectiveMethods)
    yield from _class("Communicator: serving calls", RpcServeMethods)
    yield from _class("Communicator: making calls", RpcCallMethods)
    yield from _class("Communicator: losing members", RecoveryMethods)
    yield from _class("Communicator: members that come and go", ElasticMethods)
    yield from _class("Team", nexar.Team)
    yield from _class("Compressor", nexar.Compressor)
    for compressor in (nexar.TopK, nexar.RandomK, nexar.FP8, nexar.Int8, nexar.NoCompression):
        yield from _class(compressor.__name__, compressor, but={*vars(nexar.Compressor), *vars(BlockQuantizer)})
    yield from _class("Given to a compressor: Terms", Terms)
    yield from _class("Request", Request)
    yield from _class("Seed", nexar.Seed.__mro__[1], made=True)
    yield from _class("Membership", nexar.Membership)
    yield from _class("FailureEvent", nexar.FailureEvent)
    yield from _class("MembershipEvent", nexar.MembershipEvent)
    yield from _class("Returns: Subscription", Subscription, but=_FOR_THE_FEED)
    for kind in (Checkpoint, Health, Member, Source, MessageInfo, Remote, Straggler, AwaitedPeer):
        yield from _class(f"Returns: {kind.__name__}", kind)
    yield "## Config"
    yield text_of(nexar.Config.__doc__) + "\n\nIts fields are the [settings](configuration.md)."


def _class(title: str, kind: type, *, but: set[str] = frozenset(), made: bool = False) -> Iterator[str]:  # type: ignore[assignment]
    """`but`: left out. `made`: users make one themselves."""
    yield f"## {title}"
    yield text_of(kind.__doc__)
    body = _body(kind)
    methods = [each for each in body if isinstance(each, _Definition)]
    makers = [each for each in methods if each.name == "__init__"]
    facts = [*fields_of(body), *(fact for each in makers for fact in fields_of(each.body, "self."))]
    facts += [(each.name, text_of(ast.get_docstring(each))) for each in methods if _is_property(each)]
    if made:
        yield from (_described(each, title) for each in makers)
    if facts:
        yield "\n".join(f"- `{name}`: {text}" if text else f"- `{name}`" for name, text in facts)
    for each in methods:
        if each.name not in but and _is_documented(each):
            yield _described(each)


def _is_documented(method: _Definition) -> bool:
    public = not method.name.startswith("_") and not _has(method, "property", "overload")
    return public and not (ast.get_docstring(method) or "").startswith(_MENTIONED)


def _body(kind: type) -> list[ast.stmt]:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    return found.body


def _definition(function: Callable[..., object]) -> _Definition:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(found, _Definition)
    return found


def _described(definition: _Definition, name: str = "") -> str:
    text = ast.get_docstring(definition)
    assert text, f"{definition.name} says nothing about itself"
    called = name or definition.name
    begins = "async " if isinstance(definition, ast.AsyncFunctionDef) else ""
    return f"### {called}\n\n```text\n{_wrapped(begins + called + _signature(definition))}\n```\n\n{text_of(text)}"


def _wrapped(signature: str) -> str:
    """A line ends after a parameter only."""
    words = signature.replace(" ", _TOGETHER).replace(f",{_TOGETHER}", ", ")
    lines = textwrap.wrap(words, _WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace(_TOGETHER, " ")


def _signature(definition: _Definition) -> str:
    given = definition.args
    plain = [each for each in (*given.posonlyargs, *given.args) if each.arg != "self"]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    words = [_parameter(each, default) for each, default in zip(plain, defaults, strict=True)]
    words += [f"*{_parameter(given.vararg)}"] if given.vararg else ["*"] if given.kwonlyargs else []
    words += [_parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    words += [f"**{_parameter(given.kwarg)}"] if given.kwarg else []
    gives = f" -> {_code(definition.returns)}" if definition.returns and definition.name != "__init__" else ""
    return f"({', '.join(words)}){gives}"


def _parameter(parameter: ast.arg, default: ast.expr | None = None) -> str:
    name = f"{parameter.arg}: {_code(parameter.annotation)}" if parameter.annotation else parameter.arg
    return f"{name} = {_code(default)}" if default is not None else name


def _code(expression: ast.expr) -> str:
    return ast.unparse(expression).replace("'", '"')


def _is_property(definition: _Definition) -> bool:
    return _has(definition, "property") and not definition.name.startswith("_")


def _has(definition: _Definition, *decorators: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id in decorators for each in definition.decorator_list)
