"""Objects that are described by their constructor's arguments, and created again from them."""

import dataclasses
import functools
import inspect
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast, get_args

from gainstage._base.checks import InvalidArgumentError

# The errors of constructors for arguments from a damaged file.
_UNFIT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class")
_NOT_KEPT = object()  # marks an argument that the object does not store as an attribute


def explains_config(from_config: F) -> F:
    """Wraps `from_config` to raise our own error if the argument is not a configuration."""

    @functools.wraps(from_config)
    def checked(cls: type, config: object, *args: Any, **kwargs: Any) -> Any:
        try:
            if not isinstance(config, Mapping):
                raise TypeError("not a dictionary")
            return from_config(cls, config, *args, **kwargs)
        except _UNFIT as error:
            if str(error).startswith("Expected"):
                raise
            both = isinstance(error, InvalidArgumentError)
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise (InvalidArgumentError if both else kind)(
                f"Expected a configuration of {cls.__name__}; got {reprlib.repr(config)} "
                f"({type(error).__name__}: {error})."
            ) from error

    wrapped: Any = checked
    return wrapped


class Configurable:
    """A base whose subclasses store the constructor's arguments in attributes of the same names.

    A subclass that passes unknown arguments on, as `*args, **kwargs`, still gets the full signature
    of its constructor. One `get_config` serves all subclasses. A class that only serves as a base
    says so with `_is_base`, and no configuration names it.
    """

    # Arguments that decide how an object computes, not what: they are not in its configuration.
    _left_out: ClassVar[Sequence[str]] = ()
    __signature__: ClassVar[inspect.Signature]
    _keywords: ClassVar[Sequence[inspect.Parameter]] = ()  # what `**options` of a first class takes
    _given: set[str]  # arguments that the caller passed; None means the default, so it is omitted

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _full_signature(cls)
        own, untyped = vars(cls).get("from_config"), cast(Any, cls)
        if isinstance(own, classmethod):
            untyped.from_config = classmethod(explains_config(own.__func__))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A wrapper must distinguish a given option from a default.
        self = super().__new__(cls)
        try:
            known = {k: v for k, v in kwargs.items() if k in cls.__signature__.parameters}
            passed = cls.__signature__.bind_partial(*args, **known).arguments
        except TypeError:
            passed = {}  # the constructor itself raises a better error
        object.__setattr__(self, "_given", {k for k, v in passed.items() if v is not None})
        return self

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, JSON-serializable except for callables."""
        names = [name for name in type(self).__signature__.parameters if name not in self._left_out]
        arguments = {name: self._argument(name) for name in names}
        return {name: value for name, value in arguments.items() if value is not _NOT_KEPT}

    def _argument(self, name: str) -> Any:
        """The current value of a constructor argument."""
        return getattr(self, name, _NOT_KEPT)

    @classmethod
    @explains_config
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """Returns the object that `get_config` (or Keras) describes; does not change `config`.

        Args:
            config: the constructor's arguments.
            custom_objects: classes by name, for a subclass whose arguments contain other objects.

        Raises:
            TypeError, ValueError: `config` is not a configuration of this class.
        """
        parameters = cls.__signature__.parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        return cls(**{k: v for k, v in config.items() if k not in defaults or v != defaults[k]})


def _full_signature(cls: type[Configurable]) -> inspect.Signature:
    """The signature of `cls.__init__`; `*args` and `**kwargs` become the bases' parameters."""
    parameters = list(cls._keywords)
    for base in reversed(cls.__mro__):
        if issubclass(base, Configurable) and "__init__" in vars(base):
            parameters = _with_own(base.__init__, parameters)
    return inspect.Signature(parameters)


def _with_own(
    init: Callable[..., None], inherited: list[inspect.Parameter]
) -> list[inspect.Parameter]:
    """The parameters of a constructor, and those that it passes on.

    If `**kwargs` is typed as `Unpack` of a `TypedDict`, only its keys are passed on.
    """
    own = list(inspect.signature(init).parameters.values())[1:]
    kinds = {parameter.kind: parameter for parameter in own}
    named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    handed_on = []
    if inspect.Parameter.VAR_KEYWORD in kinds:
        names = {parameter.name for parameter in named}
        handed_on = [p for p in inherited if p.name not in names]
        for typed in get_args(kinds[inspect.Parameter.VAR_KEYWORD].annotation):
            handed_on = [p for p in handed_on if p.name in typed.__annotations__]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            handed_on = [p.replace(kind=p.KEYWORD_ONLY) for p in handed_on]
    return sorted(named + handed_on, key=lambda parameter: parameter.kind)


class Fields:
    """A base of frozen dataclasses that are described by their fields."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        fields = dataclasses.fields(cast(Any, self))
        return {field.name: getattr(self, field.name) for field in fields}

    @classmethod
    @explains_config
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the object that `get_config` describes."""
        return cls(**config)


def lists_arguments(cls: type[Class], other_names: Mapping[str, str]) -> type[Class]:
    """Makes the constructor of a class list its arguments if it gets an unknown one.

    Args:
        cls: the class.
        other_names: arguments by the names that other libraries have for them.
    """
    untyped: Any = cls
    init, names = untyped.__init__, list(inspect.signature(cls).parameters)

    @functools.wraps(init)
    def checked(self: Class, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in names]
        if unknown and type(self) is cls:
            ours = other_names.get(unknown[0])
            advice = f"Write {ours}. Its" if ours in names else "Its"
            raise TypeError(
                f"{cls.__name__} has no argument {unknown[0]!r}. {advice} arguments are "
                f"{', '.join(names)}."
            )
        init(self, *args, **kwargs)

    checked.__doc__ = f"`help({cls.__name__})` explains the arguments and their defaults."
    untyped.__init__ = checked
    return cls


def description_of(obj: Any) -> dict[str, Any]:
    """Returns the description of an object with `get_config`, in Keras's format."""
    cls = type(obj)
    return {
        "module": cls.__module__,
        "class_name": cls.__name__,
        "config": obj.get_config(),
        "registered_name": None,
    }


def readable(config: object) -> Any:
    """Returns a configuration as JSON data; callables and other objects become their names."""

    def name(value: object) -> str:
        return getattr(value, "__qualname__", type(value).__qualname__)

    return json.loads(json.dumps(config, default=name))


def object_from(
    description: Mapping[str, Any], base: type, custom_objects: Mapping[str, type] | None = None
) -> Any:
    """Creates the object that a description describes.

    The class is searched among the subclasses of `base`, so that a configuration can make Python
    import or call nothing else.

    Args:
        description: the result of `serialize`, or of Keras; it is not changed.
        base: the expected class. Of several subclasses with one name, the order of preference is:
            the same module, ours for what Keras or TensorFlow wrote, not derived from another of
            them, defined last.
        custom_objects: classes by name, searched first, also for inner objects; for a description
            of a function, the function by its name.

    Raises:
        TypeError: an argument in the configuration has the wrong type.
        ValueError: it is not a description, or there is no such class, or its configuration is
            invalid.
    """
    parts = description if isinstance(description, Mapping) else {}
    name, module, config = (parts.get(key) for key in ("class_name", "module", "config"))
    if name == "function" and isinstance(config, str):
        if config in (custom_objects or {}):
            return (custom_objects or {})[config]
        raise ValueError(f"Expected the function {config!r} in custom_objects; got none.")
    if not isinstance(name, str) or not isinstance(config, Mapping):
        raise ValueError(
            f"Expected a dictionary with class_name and config for a {base.__name__}; "
            f"got {reprlib.repr(description)}."
        )
    classes = [
        cls for cls in family(base) if "_is_base" not in vars(cls) and cls.__name__[0] != "_"
    ]
    named = [cls for cls in classes if cls.__name__ == name]
    derived = {cls for cls in named if any(base in named for base in cls.__mro__[1:])}
    # A name without a module is Keras's or TensorFlow's too, unless a user has registered it.
    known_by_all = str(module).partition(".")[0] in ("None", "keras", "tf_keras", "tensorflow")
    ours = known_by_all and ">" not in str(parts.get("registered_name"))

    def preference(cls: type) -> tuple[bool, ...]:
        is_ours = ours and cls.__module__.startswith("gainstage.")
        return cls.__module__ == module, is_ours, cls not in derived

    named.sort(key=preference)
    cls: Any = (custom_objects or {}).get(name) or (named[-1] if named else None)
    if cls is None:
        known = sorted({cls.__name__ for cls in classes})
        raise ValueError(f"Expected class_name among {known} or custom_objects; got {name!r}.")
    if custom_objects and issubclass(cls, Configurable):
        return cls.from_config(dict(config), custom_objects)
    return cls.from_config(dict(config))


def family(base: type[Any]) -> Iterator[type[Any]]:
    """Yields every subclass of a class, recursively."""
    for subclass in base.__subclasses__():
        yield subclass
        yield from family(subclass)
