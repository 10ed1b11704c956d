"""`prefold explain`: what a running server says of itself, in words."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from prefold.cli.options import Flag, text

TIMEOUT_S = 30.0
MAX_ERROR_BYTES = 65536


@dataclass(frozen=True)
class ExplainArgs:
    """Ask a server what runs where, how much fits, and why requests wait.

    The same is in GET /v1/explain, for programs, and below the pictures of /dashboard.

    Attributes:
        url: Address of the server, such as http://localhost:8000.
        api_key: Key of the server, if it has one.
        json: Print the answer as JSON, with all numbers.
    """

    url: Annotated[Positional[str], arg(metavar="URL")]
    api_key: Annotated[str | None, text("KEY")] = None
    json: Flag = False


def run(args: ExplainArgs) -> int:
    answer = fetch(args.url, args.api_key)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        show(answer)
    return 0


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """What the server answers. ValueError if that is an error or no explanation, OSError if nobody does."""
    address = url if "://" in url else f"http://{url}"
    address = address.rstrip("/").removesuffix("/v1") + "/v1/explain"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
    headers = {"Accept": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S
        ) as got:
            answer = json.loads(got.read())
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(f"{address}: {_message_of(error)}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{address} does not answer: {error.reason}") from None
    except json.JSONDecodeError:
        raise ValueError(f"{address} is no server of this kind: its answer is no JSON") from None
    if not isinstance(answer, dict) or "sections" not in answer:
        raise ValueError(f"{address} is no server of this kind")
    return answer


def _message_of(error: urllib.error.HTTPError) -> str:
    """The server's own words, if it has some."""
    try:
        message = json.loads(error.read(MAX_ERROR_BYTES))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return f"status {error.code}: {message}"


def show(answer: dict[str, Any]) -> None:
    """Print the sections with their titles."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    failure = f": {answer['failure']}" if answer["failure"] else ""
    console.print(Text.assemble("The engine is ", (answer["status"], "bold"), f"{failure}."))
    for section in answer["sections"]:
        console.print()
        console.print(Text(section["title"], style="bold"))
        for sentence in section["sentences"]:
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
