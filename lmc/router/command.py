"""`lmc router`: sends each request to the engine that has its documents."""

import difflib
import json
import logging
import os
import signal
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import typer

from lmc.admin_address import LOCAL, TOKEN, admin_token
from lmc.errors import ConfigError
from lmc.router.arguments import (
    addresses,
    check_kv_events,
    checked,
    items,
    other_flags,
    paths_of_models,
    policy_name,
    written_options,
)
from lmc.router.engines import EnginePorts, Engines
from lmc.router.settings import RouterSettings

log = logging.getLogger(__name__)

ENV = "LMC_ROUTER_"
OF_POLICIES = (
    "cache_tokens", "ratio", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold",
    "eviction_interval_secs", "max_tree_size",
)  # fmt: skip
ENDING = 60  # seconds for which answers that have begun are waited for


def _variable(name: str) -> str:
    return ENV + name.upper()


def _read_file(context: typer.Context, file: Path | None) -> Path | None:
    """Take the values of a YAML file for options that neither the command line nor the environment has.

    Raises `ConfigError` if the file or the environment names an option that there is not.
    """
    import yaml

    known = {str(parameter.name) for parameter in context.command.params}
    _check_environment(known)
    if file is None:
        return None
    try:
        found = yaml.safe_load(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file} cannot be read: {getattr(error, 'strerror', None) or 'no YAML'}") from None
    values = {str(name).replace("-", "_"): value for name, value in found.items()} if isinstance(found, dict) else None
    if values is None or (unknown := values.keys() - known):
        wrong = f"unknown: {', '.join(sorted(unknown))}" if values is not None else "it holds no mapping"
        raise ConfigError(f"--config {file}: {wrong}; `lmc router --help` shows the options, which are its names")
    for name, value in values.items():
        if name == "option":
            values[name] = list(map(str, value)) if isinstance(value, list) else [str(value)]
        elif name == "tokenizers" and isinstance(value, dict):
            written = {str(model): str(path or "") for model, path in value.items()}
            values[name] = json.dumps(written)  # Names and paths may have commas or equals signs in them.
        elif isinstance(value, list):
            values[name] = ",".join(map(str, value))
    context.default_map = values
    return file


Config = Annotated[
    Path | None,
    typer.Option(callback=_read_file, is_eager=True, envvar=_variable("config_file"), help="a YAML file of options"),
]
Backends = Annotated[
    str, typer.Option(envvar=_variable("static_backends"), help="URLs of engines, with commas between them")
]
Models = Annotated[
    str, typer.Option(envvar=_variable("static_models"), help="the model of each of them; by default they are asked")
]
Caches = Annotated[
    str,
    typer.Option(envvar=_variable("static_caches"), help="the cache of each: engines of one lmc serve have one name"),
]
Admins = Annotated[
    str, typer.Option(envvar=_variable("static_admins"), help="the LMC_ADMIN of each, which says what documents it has")
]
KVEventAddresses = Annotated[
    str,
    typer.Option(
        envvar=_variable("static_kv_events"),
        help="for precise: tcp://HOST:PORT of each engine's KV events, or tcp://…+tcp://… with where they are replayed",
    ),
]
AdminPort = Annotated[
    int,
    typer.Option(
        envvar=_variable("admin_port"), min=0, max=65535, help="of LMC_ADMIN at the hosts of engines; 0 for none"
    ),
]
KVEventsPort = Annotated[
    int,
    typer.Option(
        envvar=_variable("kv_events_port"), min=0, max=65535, help="for precise: of KV events at the hosts of engines"
    ),
]
KVReplayPort = Annotated[
    int, typer.Option(envvar=_variable("kv_replay_port"), min=0, max=65535, help="where KV events are replayed")
]
Where = Annotated[
    str,
    typer.Option(
        envvar=_variable("discovery"),
        help="file:PATH, dns:HOST:PORT or kubernetes:NAMESPACE/LABEL=VALUE:PORT, where engines come and go",
    ),
]
PolicyName = Annotated[
    str, typer.Option("--policy", "--routing-logic", envvar=_variable("policy"), help="how engines are chosen")
]
Host = Annotated[str, typer.Option(envvar=_variable("host"), help="where to listen")]
Port = Annotated[int, typer.Option(envvar=_variable("port"), min=0, max=65535)]
SessionKey = Annotated[str, typer.Option(envvar=_variable("session_key"), help="the header that names a session")]
SpecialString = Annotated[
    str, typer.Option(envvar=_variable("special_string"), help="blend_special_str of the engines")
]
CacheTokens = Annotated[
    float | None, typer.Option(envvar=_variable("cache_tokens"), min=1, help="tokens that an engine's cache holds")
]
Ratio = Annotated[
    float | None, typer.Option(envvar=_variable("ratio"), min=0, max=1, help="blend_recompute_ratios of the engines")
]
Threshold = Annotated[
    float | None, typer.Option(envvar=_variable("cache_threshold"), min=0, max=1, help="of cache_aware")
]
Absolute = Annotated[int | None, typer.Option(envvar=_variable("balance_abs_threshold"), min=0, help="of cache_aware")]
Relative = Annotated[
    float | None, typer.Option(envvar=_variable("balance_rel_threshold"), min=0, help="of cache_aware")
]
Interval = Annotated[
    float | None, typer.Option(envvar=_variable("eviction_interval_secs"), min=0, help="of cache_aware")
]
TreeSize = Annotated[
    int | None, typer.Option(envvar=_variable("max_tree_size"), min=1, help="of cache_aware, in letters")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        envvar=_variable("option"),
        help="another option of the policy, as name=value; may be given several times (in a variable: with blanks)",
    ),
]
ExactTokens = Annotated[
    bool,
    typer.Option(
        "--exact-tokens",
        envvar=_variable("exact_tokens"),
        help="ask an engine for the tokens of each prompt first, which takes some milliseconds",
    ),
]
Tokenizers = Annotated[
    str,
    typer.Option(
        envvar=_variable("tokenizers"),
        help="MODEL=DIRECTORY, with commas between them, or a mapping in JSON: exact tokens without asking an engine",
    ),
]
TokenizerProcesses = Annotated[
    int, typer.Option(envvar=_variable("tokenizer_processes"), min=1, help="beside the router, for --tokenizers")
]
ApiKey = Annotated[str, typer.Option(envvar=_variable("api_key"), help="for the engines, instead of what clients send")]
ClientTokens = Annotated[
    str,
    typer.Option(
        envvar=_variable("client_tokens"),
        help="of those who may ask, with commas between them; better in the variable, which no list of processes shows",
    ),
]
AllowedPaths = Annotated[
    str,
    typer.Option(
        envvar=_variable("allowed_paths"),
        help="that are sent on to engines beside those that compute, with commas between them",
    ),
]
MostRequests = Annotated[
    int, typer.Option(envvar=_variable("max_requests"), min=1, help="at once; others are answered 429")
]
MostMib = Annotated[int, typer.Option(envvar=_variable("max_body_mib"), min=1, help="of a request")]
MostHeldMib = Annotated[
    int, typer.Option(envvar=_variable("max_held_mib"), min=1, help="of all requests together that are being answered")
]
HealthSeconds = Annotated[
    float, typer.Option(envvar=_variable("health_seconds"), min=0.1, help="between two looks at an engine")
]
AnswerSeconds = Annotated[
    float, typer.Option(envvar=_variable("answer_seconds"), min=1, help="an engine may be silent before it has failed")
]


def _check_environment(known: Set[str]) -> None:
    """Raise `ConfigError` for variables of no option. Those of a Kubernetes service `lmc-router` are dropped."""
    from lmc.config_sources import is_of_a_service

    variables = {_variable(name) for name in known - {"config"}} | {_variable("config_file")}
    for name, value in list(os.environ.items()):
        if name.startswith(ENV) and is_of_a_service(name, value):
            del os.environ[name]
        elif name.startswith(ENV) and name not in variables:
            near = difflib.get_close_matches(name, variables, 1)
            raise ConfigError(f"unknown variable {name}" + (f": did you mean {near[0]}?" if near else ""))


def router(
    context: typer.Context,
    config: Config = None,
    static_backends: Backends = "",
    static_models: Models = "",
    static_caches: Caches = "",
    static_admins: Admins = "",
    static_kv_events: KVEventAddresses = "",
    admin_port: AdminPort = 0,
    kv_events_port: KVEventsPort = 0,
    kv_replay_port: KVReplayPort = 0,
    discovery: Where = "",
    policy: PolicyName = "documents",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    session_key: SessionKey = "x-session-id",
    special_string: SpecialString = " # # ",
    cache_tokens: CacheTokens = None,
    ratio: Ratio = None,
    cache_threshold: Threshold = None,
    balance_abs_threshold: Absolute = None,
    balance_rel_threshold: Relative = None,
    eviction_interval_secs: Interval = None,
    max_tree_size: TreeSize = None,
    option: Options = None,
    exact_tokens: ExactTokens = False,
    tokenizers: Tokenizers = "",
    tokenizer_processes: TokenizerProcesses = 2,
    api_key: ApiKey = "",
    client_tokens: ClientTokens = "",
    allowed_paths: AllowedPaths = "",
    max_requests: MostRequests = 1000,
    max_body_mib: MostMib = 32,
    max_held_mib: MostHeldMib = 1024,
    health_seconds: HealthSeconds = 5.0,
    answer_seconds: AnswerSeconds = 600.0,
) -> None:
    """Send each request to the engine that has its documents.

    The engines are vLLM servers. Clients use the router as they would use one of them. Every option can be written as a
    variable, such as LMC_ROUTER_PORT, or in a YAML file. LMC_ADMIN_TOKEN is the token for /engines and /lmc/….
    """
    known = [f"--{str(parameter.name).replace('_', '-')}" for parameter in context.command.params]
    others, policy = other_flags(context.args, known), policy_name(policy)
    settings = RouterSettings(
        session_key=session_key, special_string=special_string, exact_tokens=exact_tokens,
        api_key=api_key, tokenizers=paths_of_models(tokenizers), tokenizer_processes=tokenizer_processes,
        admin_token=admin_token(), open_admin=host in LOCAL, max_requests=max_requests,
        client_tokens=frozenset(items(client_tokens)), allowed_paths=frozenset(items(allowed_paths)),
        max_body=max_body_mib << 20, max_held=max_held_mib << 20,
        health_seconds=health_seconds, answer_seconds=answer_seconds,
    )  # fmt: skip
    options = {name: value for name in OF_POLICIES if (value := context.params[name]) is not None}
    options |= others.options | written_options(option or [])
    engines = Engines(EnginePorts(admin_port, kv_events_port, kv_replay_port))
    of_engines = static_models, static_caches, static_admins, static_kv_events
    for one in addresses(static_backends or others.backends, *of_engines):
        engines.add(one)
    where = discovery or others.discovery
    check_kv_events(policy, engines, where)
    _run(checked(settings, TOKEN), policy, options, engines, where, (host, port))


def _run(
    settings: RouterSettings,
    policy: str,
    options: dict[str, Any],
    engines: Engines,
    where: str,
    listen: tuple[str, int],
) -> None:
    """Run a router until it is told to end."""
    from lmc.config_sources import log_level

    logging.basicConfig(level=log_level(logging.INFO), format="%(asctime)s %(levelname)s %(message)s")
    try:
        import uvicorn

        from lmc.http_server import tcp_socket
        from lmc.router.application import Router
        from lmc.router.connections import allow_files, bounded_protocol
        from lmc.router.discovery import discovery
        from lmc.router.policies import from_command_line
    except ImportError as error:
        raise ConfigError(f"lmc router needs {error.name}: pip install 'lmc[router]'") from None
    if not len(engines) and not where:
        raise ConfigError("say where the engines are: --static-backends http://a:8000,http://b:8000, or --discovery")
    if policy == "documents":
        options = {"special_string": settings.special_string, **options}
    application = Router(settings, from_command_line(policy, options), engines, discovery(where) if where else None)
    try:
        listening = tcp_socket(*listen)
    except OSError as error:
        wrong = f"--host {listen[0]} --port {listen[1]}: nothing can listen there ({error.strerror})"
        raise ConfigError(f"{wrong}; is the port in use?") from None
    allow_files(settings.max_requests)
    config = uvicorn.Config(
        application,
        http=bounded_protocol(),
        log_level="critical",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=ENDING,
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn listens to them later, and raises again what has ended it.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    log.info(
        "lmc router: listening at %s:%s, policy %s, %d engines", *listening.getsockname()[:2], policy, len(engines)
    )
    server.run([listening])
    log.info("lmc router: ended")
