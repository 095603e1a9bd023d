"""Files of flags: `--config=FILE` in YAML or TOML, and `--flagfile=FILE` with one flag per line.

Flags on the command line win over those of files, wherever they stand. Imports no JAX.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekoa.core import files
from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli.run_config import FLAG_NAMES, UsageError

FILE_FLAGS = {
    "config": "file with flags, in YAML or TOML; the command line wins",
    "flagfile": "file with one flag per line; the command line wins",
}
_MODEL_SETTINGS = "module_config"
_MAX_BYTES = 2**20


def expand(arguments: Sequence[str]) -> list[str]:
    """Replaces `--config` and `--flagfile` by the flags in their files, before all others.

    Raises:
        UsageError: If a file cannot be read, or has a key that is not a flag.
    """
    from_files: list[str] = []
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, path = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or name not in FILE_FLAGS:
            others.append(argument)
            continue
        path = path if equals else next(remaining, "")
        if not path:
            raise UsageError(f"--{name} needs a file: --{name}=FILE.")
        from_files += read_config(path) if name == "config" else _read_flagfile(path)
    return [*from_files, *others]


def _read_flagfile(path: str) -> list[str]:
    if not files.local_path(path).is_file():
        raise UsageError(f"--flagfile={path} does not exist, or is not a file.")
    from absl import flags  # Not needed for help.

    try:
        return flags.FlagValues().read_flags_from_files([f"--flagfile={path}"])
    except (flags.Error, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--flagfile={path} cannot be read: {error}.") from None


def read_config(path: str) -> list[str]:
    """Returns the contents of a YAML or TOML file as flags.

    Keys are names of flags. `module_config` may hold the settings of the model, nested as there.

    Raises:
        UsageError: If the file cannot be read, or has a key that is not a flag.
    """
    values = _read(path)
    arguments = []
    for name, value in values.items():
        if name not in FLAG_NAMES:
            hint = did_you_mean(str(name), FLAG_NAMES, n=3)
            raise UsageError(
                f"{path}: {name!r} is not a flag.{hint} Run `tekoa --help` for a list of flags."
            )
        if isinstance(value, Mapping) and name != _MODEL_SETTINGS:
            raise UsageError(f"{path}: {name!r} must be a single value, got {value!r}.")
        arguments += _as_flags(path, name, value)
    return arguments


def _as_flags(path: str, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _as_flags(path, f"{name}.{key}", entry)
    elif isinstance(value, list) and all(_is_scalar(entry) for entry in value):
        yield f"--{name}={','.join(map(_text, value))}"
    elif _is_scalar(value):
        yield f"--{name}={_text(value)}"
    elif value is not None:
        raise UsageError(f"{path}: {name!r} must be a text, a number or a list, got {value!r}.")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, bool, int, float))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(path: str) -> Mapping[str, Any]:
    local = files.local_path(path)
    if local.suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(f"--config={path} must be a file with the ending .yaml, .yml or .toml.")
    try:
        text = files.read_bytes(local.resolve(), max_bytes=_MAX_BYTES).decode()
        values = _parse_toml(text) if local.suffix == ".toml" else _parse_yaml(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"--config={path} cannot be read: {reason}.") from None
    if not isinstance(values, Mapping):
        raise UsageError(f"{path} must contain flags as `name: value`, got {values!r:.40}.")
    return values


def _parse_toml(text: str) -> Any:
    import tomllib  # Few commands need it.

    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    """Parses YAML, and refuses a key that is there twice: YAML itself would drop the first.

    Raises:
        ValueError: If it is not valid.
    """
    import yaml  # Few commands need it.

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = {str(key) for key in keys if keys.count(key) > 1}
            if twice:
                raise ValueError(f"{', '.join(sorted(twice))} is there twice{node.start_mark}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
