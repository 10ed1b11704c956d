"""What the operator of a server decides, and the sampling defaults that a checkpoint brings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP side; the engine has its own.

    Attributes:
        served_model_names: names that requests may use; the first is the one in responses.
        api_keys: any of them is accepted as a bearer token; none: everybody may ask.
        allow_origins: origins of browsers that may ask (CORS); "*" is any.
        max_body_bytes: longest body of a request.
        request_timeout_s: time for one request from its first byte to its last; None: no limit.
        drain_timeout_s: how long running requests may go on after SIGTERM.
        chat_template: text of a Jinja template, instead of the checkpoint's.
        tool_call_parser: how the model writes tool calls: a name of `tool_parsers.TOOL_FORMATS`, "auto" (what
            the chat template uses) or "none".
        defaults: sampling parameters of requests that leave them out.
        log_requests: a line per request.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    request_timeout_s: float | None = None
    drain_timeout_s: float = 60.0
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    defaults: SamplingDefaults | None = None
    log_requests: bool = False

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Used where a request leaves the field out; OpenAI's own unless the checkpoint says otherwise."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def describe(self) -> str:
        """The fields that differ from OpenAI's, as `temperature=0.6, top_p=0.95`; "" if there are none."""
        return ", ".join(f"{name}={value}" for name, value in msgspec.to_builtins(self).items())


def read_sampling_defaults(folder: str | Path) -> SamplingDefaults:
    """The defaults in a checkpoint's generation_config.json; OpenAI's if there is no such file.

    Raises:
        ValueError: the file is there and is no JSON object, or a field has a wrong type.
    """
    file = Path(folder).expanduser() / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        given = json.loads(file.read_bytes())
        known = {
            name: given[name] for name in SamplingDefaults.__struct_fields__ if given.get(name) is not None
        }
        return msgspec.convert(known, SamplingDefaults)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be used (--generation-config none ignores it): {error}") from None
