"""Every drafting method, one file or one folder each, and the registry that finds them.

A new drafter is one file or folder here, a class anywhere behind `@register("name")`, or an entry point in the group
`outrider.drafters`; nothing else is edited. The contract of a drafter is in `engine.drafter`. A method's folder is
complete: deleting it deletes the method.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ..backends import Model, Passes, ResumableLayers
from ..engine.cache import Cache, Plane
from ..engine.drafter import (
    Drafter as Drafter,
    DraftRequest as DraftRequest,
    Forecast as Forecast,
    Memory as Memory,
    Prices as Prices,
    Traits as Traits,
)
from ..errors import ConfigError
from ..params import SamplingParams


@dataclass(frozen=True)
class Workspace:
    """What a drafter is built with: the target and its K/V, the shared slots, and its options."""

    target: Model
    cache: Cache
    plane: Plane  # the target's own
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None  # the target's; None for a target without text
    passes: Callable[..., Passes | None] = lambda model, plane, cache=None: None  # None: call the model itself
    first_layers: ResumableLayers | None = None  # None: the backend runs the target's passes whole
    record_guesses: bool = False  # fill `Tree.guesses` for a listener that records them

    def option(self, *names: str, default: Any) -> Any:
        """The first of these options that is set: an option may have one name here and another in other engines."""
        return next((self.options[name] for name in names if self.options.get(name) is not None), default)


_REGISTRY: dict[str, type[Drafter]] = {}
D = TypeVar("D", bound=type[Drafter])


def register(name: str) -> Callable[[D], D]:
    """Class decorator: add a drafter to the registry under this name."""

    def add(cls: D) -> D:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """Every registered drafter."""
    _discover()
    return sorted(_REGISTRY)


def lookup(drafter: str | type[Drafter]) -> type[Drafter]:
    """The drafter class of this name, or of `file.py:Class` or `module:Class`; a class is returned unchanged."""
    if not isinstance(drafter, str):
        return _checked(drafter)
    _discover()
    if ":" in drafter:
        return _load(drafter)
    if drafter not in _REGISTRY:
        raise ConfigError(f"There is no drafter called '{drafter}'. Choose one of: {', '.join(names())}.")
    return _REGISTRY[drafter]


def _checked(drafter: Any) -> type[Drafter]:
    """Refuse what is no drafter before a model is loaded."""
    shown = getattr(drafter, "__name__", repr(drafter))
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise ConfigError(f"{shown} is no drafter: pass a name, or a class that inherits from outrider.Drafter.")
    if drafter.draft is Drafter.draft:
        raise ConfigError(f"The drafter {shown} has no method draft(self, request): docs/write-a-drafter.md shows one.")
    if not drafter.name:
        drafter.name = drafter.__name__
    return drafter


@cache
def _load(place: str) -> type[Drafter]:
    """The class of `file.py:Class` or `module:Class`."""
    source, _, name = place.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # it is the user's code: it may raise anything
        raise ConfigError(f"The drafter {place} cannot be loaded: {type(error).__name__}: {error}.") from error
    if not hasattr(module, name):
        found = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Drafter)]
        listed = ", ".join(key for key in found if key != "Drafter") or "none"
        raise ConfigError(f"There is no class {name} in {source}; drafters in it: {listed}.")
    return _checked(getattr(module, name))


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    name = f"outrider_drafter_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def about(drafter: str | type[Drafter]) -> str:
    """Its description for users: the first line of its module's docstring, or of its folder's."""
    module = lookup(drafter).__module__
    folder = module.rpartition(".")[0]
    doc = sys.modules[folder if folder.count(".") > 1 and folder.startswith(__name__) else module].__doc__ or ""
    return doc.strip().partition("\n")[0]


def make(drafter: str | type[Drafter], workspace: Workspace) -> Drafter:
    """Build a drafter; its options are in the workspace."""
    cls = lookup(drafter)
    if not suits(cls, workspace.target):
        raise ConfigError(
            f"The drafter '{cls.name}' runs single layers of the target, but transformers runs this target as a "
            "whole. Choose suffix, ngram, model, layerskip or head."
        )
    try:
        return cls(workspace)
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"The drafter '{cls.name}' cannot be built with these options: {error}.") from error


def suits(drafter: str | type[Drafter], target: Model) -> bool:
    """Whether a drafter can work with this kind of target at all."""
    return not lookup(drafter).traits.needs_layers or target.has_layers


def check_options(drafter: str | type[Drafter], options: Iterable[str]) -> None:
    """Raise for an option that no registered drafter takes: a misspelt one would silently do nothing."""
    if lookup(drafter).traits.options is None:
        return
    known = {name for other in _REGISTRY.values() for name in other.traits.options or ()}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *SamplingParams.__dataclass_fields__], 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"There is no option '{name}'.{hint}")


@cache
def _discover() -> None:
    """Import this folder's drafters and installed plug-ins, once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for point in entry_points(group="outrider.drafters"):
        try:
            register(point.name)(point.load())
        except Exception as error:  # a broken plug-in must not disable the others
            warnings.warn(f"The drafter plug-in '{point.name}' ({point.value}) cannot be loaded: {error}", stacklevel=2)
