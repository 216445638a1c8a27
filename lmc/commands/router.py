"""`lmc router`: reads the command line, the environment and a YAML file, and runs the router."""

import difflib
import errno
import json
import logging
import os
import signal
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmc.errors import ConfigError
from lmc.http.address import admin_token, is_local
from lmc.router.engines import EnginePorts, Engines
from lmc.router.policies import from_command_line

if TYPE_CHECKING:
    from lmc.config.sources import Given
    from lmc.router.policies.base import Policy
    from lmc.router.settings import RouterSettings

# `lmc.router.arguments` is imported in functions, so that `lmc --help` does not import pydantic.

log = logging.getLogger(__name__)

# The packages of the extra `router`. Their names are in the error, because the lmc of PyPI is another project.
PACKAGES = "starlette uvicorn httptools uvloop aiohttp pyzmq msgspec cachetools"
PREFIX = "LMC_ROUTER"  # prefix of variables; typer derives their names from the options
CONFIG_VARIABLE = f"{PREFIX}_CONFIG_FILE"
SHUTDOWN_SECONDS = 60  # timeout for responses in flight at shutdown
SOURCES = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")  # as click names them; later ones win
FROM_FILE = "lmc.router.moved"  # key in the context's data: values from the file that belong to `--option` now


def _read_file(context: typer.Context, file: Path | None) -> Path | None:
    """Read the YAML file. Its values apply to options missing from the command line and the environment.

    Raises `ConfigError` if the file or the environment names an unknown option.
    """
    from lmc.config.sources import read_mapping
    from lmc.router.arguments import FORMER_FLAGS

    names = {str(parameter.name) for parameter in context.command.params}
    _check_environment(names)
    if file is None:
        return None
    content = read_mapping(file, f"--config {file}", "policy: documents")
    values: dict[str, Any] = {}
    for name, value in content.items():
        option = str(name).replace("-", "_")
        if option in values:
            raise ConfigError(f"--config {file} has {option} twice, with - and with _: leave one of the two out")
        values[option] = value
    if unknown := values.keys() - names - FORMER_FLAGS:
        raise ConfigError(f"--config {file} has unknown options {', '.join(sorted(unknown))}; see `lmc router --help`")
    for name, value in values.items():
        if name == "option":
            values[name] = list(map(str, value)) if isinstance(value, list) else [str(value)]
        elif name == "tokenizers" and isinstance(value, dict):
            # JSON, because names and paths may contain commas or equals signs.
            values[name] = json.dumps({str(model): str(path or "") for model, path in value.items()})
        elif isinstance(value, list):
            values[name] = ",".join(map(str, value))
    context.meta[FROM_FILE] = {name: values[name] for name in values.keys() & FORMER_FLAGS}
    context.default_map = values
    return file


def _check_environment(names: Set[str]) -> None:
    """Raise `ConfigError` for variables of unknown options. Removes variables of a Kubernetes service `lmc-router`."""
    from lmc.config.sources import is_of_a_service
    from lmc.router.arguments import FORMER_FLAGS

    variables = {f"{PREFIX}_{name.upper()}" for name in names - {"config"} | FORMER_FLAGS} | {CONFIG_VARIABLE}
    for name, value in list(os.environ.items()):
        if name.startswith(f"{PREFIX}_") and is_of_a_service(name, value):
            del os.environ[name]
        elif name.startswith(f"{PREFIX}_") and name not in variables:
            near = difflib.get_close_matches(name, variables, 1)
            raise ConfigError(f"unknown variable {name}" + (f": did you mean {near[0]}?" if near else ""))


def router(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(callback=_read_file, is_eager=True, envvar=CONFIG_VARIABLE, help="YAML file with these options"),
    ] = None,
    static_backends: Annotated[str, typer.Option(help="URLs of the engines, comma-separated")] = "",
    static_models: Annotated[
        str, typer.Option(help="models of the engines, comma-separated; by default from their /v1/models")
    ] = "",
    static_caches: Annotated[
        str,
        typer.Option(help="cache names of the engines, comma-separated; engines of one `lmc serve` have the same name"),
    ] = "",
    static_admins: Annotated[
        str, typer.Option(help="LMC_ADMIN addresses of the engines, comma-separated, which report their documents")
    ] = "",
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of each engine's LMC_ADMIN endpoint (0: none)")
    ] = 0,
    discovery: Annotated[
        str,
        typer.Option(help="source of the engines: file:PATH, dns:HOST:PORT or kubernetes:NAMESPACE/LABEL=VALUE:PORT"),
    ] = "",
    policy: Annotated[
        str, typer.Option("--policy", "--routing-logic", help="routing policy; docs/router.md lists them")
    ] = "documents",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="another option of the router or the policy, as name=value; repeatable (in the variable: separated "
            "by spaces); docs/router.md lists them"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen at")] = 8000,
    api_key: Annotated[str, typer.Option(help="API key sent to engines; replaces the client's")] = "",
    client_tokens: Annotated[
        str,
        typer.Option(
            help="accepted client tokens, comma-separated; safer in the variable LMC_ROUTER_CLIENT_TOKENS, because "
            "other users can read command lines"
        ),
    ] = "",
    max_requests: Annotated[
        int, typer.Option(min=1, help="maximum number of requests in flight; others get the response 429")
    ] = 1000,
    answer_seconds: Annotated[
        float, typer.Option(min=1, help="seconds without data from an engine, after which a request fails")
    ] = 600.0,
    tokenizers: Annotated[
        str,
        typer.Option(
            help="tokenizers for tokenizing in the router: MODEL=DIRECTORY, comma-separated, or a JSON mapping"
        ),
    ] = "",
) -> None:
    """Send each request to the vLLM server that has its documents.

    Clients use the router as they would use one vLLM server. Every option can also be set by a variable, such as
    LMC_ROUTER_PORT, or in a YAML file. LMC_ADMIN_TOKEN protects /engines and /lmc/….
    """
    from lmc.config.sources import set_up_log
    from lmc.router.arguments import (
        addresses,
        check_kv_events,
        checked,
        items,
        other_flags,
        paths_of_models,
        policy_name,
        policy_options,
        router_options,
    )
    from lmc.router.settings import RouterSettings

    set_up_log()
    _check_secrets(context)
    flags = other_flags(context.args, [f"--{parameter.name}".replace("_", "-") for parameter in context.command.params])
    given, moved = _options(context, flags.moved, option or [], config)
    name, options = policy_name(policy), router_options(given)
    settings = RouterSettings(
        session_key=options.session_key, special_string=options.special_string, exact_tokens=options.exact_tokens,
        api_key=api_key, tokenizers=paths_of_models(tokenizers), tokenizer_processes=options.tokenizer_processes,
        admin_token=admin_token(), open_admin=is_local(host), max_requests=max_requests,
        client_tokens=frozenset(items(client_tokens)), allowed_paths=frozenset(items(options.allowed_paths)),
        max_body=options.max_body_mib << 20, max_held=options.max_held_mib << 20,
        health_seconds=options.health_seconds, answer_seconds=answer_seconds,
    )  # fmt: skip
    engines = Engines(EnginePorts(admin_port, options.kv_events_port, options.kv_replay_port))
    columns = static_models, static_caches, static_admins, options.static_kv_events
    for engine in addresses(static_backends or flags.backends, *columns):
        engines.add(engine)
    source = discovery or flags.discovery
    if not len(engines) and not source:
        raise ConfigError("no engines: set --static-backends http://a:8000,http://b:8000, or --discovery")
    chosen_policy = from_command_line(name, {**flags.options, **policy_options(name, given)})
    if chosen_policy.needs.cutter is not None:
        chosen_policy.needs.cutter.special_string = options.special_string
    check_kv_events(name, chosen_policy, engines, source)
    if not is_local(host) and not settings.client_tokens:
        log.warning("lmc router: admits every client that reaches --host %s; set %s_CLIENT_TOKENS", host, PREFIX)
    _run(checked(settings), name, chosen_policy, engines, source, (host, port), moved)


def _check_secrets(context: typer.Context) -> None:
    """Raise `ConfigError` for secrets that are given but empty: without them, the router admits every client."""
    from lmc.router.arguments import items

    for name in ("client_tokens", "api_key"):
        variable, flag = f"{PREFIX}_{name.upper()}", f"--{name}".replace("_", "-")
        on_command_line = getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        # To typer, an empty variable is a missing one, and so is an empty value in the file.
        given = on_command_line or variable in os.environ or name in (context.default_map or {})
        if given and not items(context.params[name] or ""):
            raise ConfigError(f"{flag} is empty: set a secret, or leave out the option and {variable}")


def _options(
    context: typer.Context, flags: Mapping[str, str], options: list[str], file: Path | None
) -> tuple[dict[str, "Given"], dict[str, Any]]:
    """Return the values of `--option` from all sources, and those given in the form of earlier versions.

    Earlier versions had a flag, a variable and a name in the file for each of these options. All three still work.
    """
    from lmc.config.sources import Given
    from lmc.router.arguments import FORMER_FLAGS, written_options

    variables = {name: value for name in sorted(FORMER_FLAGS) if (value := os.environ.get(f"{PREFIX}_{name.upper()}"))}
    moved = dict(zip(SOURCES, (context.meta.get(FROM_FILE, {}), variables, flags), strict=True))
    source = getattr(context.get_parameter_source("option"), "name", "")
    given: dict[str, Given] = {}
    for kind, origin in zip(SOURCES, (f"YAML {file}", "environment", "command line"), strict=True):
        values = moved[kind] | (written_options(options) if kind == source else {})
        given |= {name: Given(value, origin) for name, value in values.items()}
    return given, {name: value for kind in SOURCES for name, value in moved[kind].items()}


def _run(
    settings: "RouterSettings",
    name: str,
    policy: "Policy",
    engines: Engines,
    source: str,
    listen: tuple[str, int],
    moved: Mapping[str, Any],
) -> None:
    """Run a router until SIGTERM or SIGINT arrives."""
    try:
        import uvicorn

        from lmc.http.server import tcp_socket
        from lmc.router.application import Router
        from lmc.router.connections import allow_files, bounded_protocol
        from lmc.router.discovery import discovery
    except ImportError as error:
        raise ConfigError(f"lmc router needs {error.name}: pip install {PACKAGES}") from None
    if moved:
        instead = " ".join(f"--option {option}={value}" for option, value in moved.items())
        log.warning("lmc router: read options in a deprecated form; use instead: %s", instead)
    application = Router(settings, policy, engines, discovery(source) if source else None)
    try:
        listening = tcp_socket(*listen)
    except OSError as error:
        hint = "is the port in use?" if error.errno == errno.EADDRINUSE else "use another host or port"
        raise ConfigError(
            f"cannot listen at --host {listen[0]} --port {listen[1]} ({error.strerror}); {hint}"
        ) from None
    allow_files(settings.max_requests)
    config = uvicorn.Config(
        application,
        http=bounded_protocol(),
        log_level="critical",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(config)
    # uvicorn replaces these handlers later, and raises the signal again after shutdown.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    log.info("lmc router: listening at %s:%s, policy %s, %d engines", *listening.getsockname()[:2], name, len(engines))
    server.run([listening])
    log.info("lmc router: stopped")
