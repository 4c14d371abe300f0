"""What deploy/ says is what the server has: options and their values, ports, routes, metrics, commands; and what Docker, compose and
Kubernetes accept, as far as their schemas tell. The overlays are rendered by kubectl, where there is one."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import tomllib

import check_jsonschema
import pytest
import yaml
from kubernetes_types import problems

from server.commands import serve
from server.commands.arguments import make_parser
from server.config.commands import ServeConfig, load_serve_config
from server.proxy.process import STOP_SECONDS
from server.proxy.routes import make_app
from server.telemetry.metrics import Metrics
from warmup.folder import Folder

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text()
KUBERNETES = ("overlays/cpu", "overlays/tpu", "multi-host", "ray")
ROUTES = {route.path for route in make_app(("localhost:9000",)).routes}
METRICS = set(re.findall(r"^# TYPE (\w+)", Metrics().render(), re.MULTILINE))
FLAGS = {action.dest for action in make_parser()._subparsers._group_actions[0].choices["serve"]._actions}
COMMANDS = set(make_parser()._subparsers._group_actions[0].choices)

# What the manifests are ready for and a server may not have: option or command -> how the README has to say so.
EXPECTED = {
    "coordinator": "needs multi-host serving, which this version does not have yet",
    "num_hosts": "needs multi-host serving, which this version does not have yet",
    "host_id": "needs multi-host serving, which this version does not have yet",
    "ray": "needs `preheat ray`, which this version does not have yet",
}
MISSING = {name for name in EXPECTED if name not in FLAGS | COMMANDS}
GIVEN = {"LWS_LEADER_ADDRESS": "preheat-0.preheat.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}  # by LeaderWorkerSet


@pytest.fixture(scope="module")
def rendered():
    """The objects of each overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl, which renders the overlays")

    def render(folder):
        done = subprocess.run(["kubectl", "kustomize", DEPLOY / "kubernetes" / folder], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    return {folder: render(folder) for folder in KUBERNETES}


def files(*endings: str) -> list[pathlib.Path]:
    return sorted(path for path in DEPLOY.rglob("*") if path.name.endswith(endings))


# Kubernetes.


def pods(objects):
    """Each object that makes pods, with the template of each kind of its pods."""
    for document in objects:
        match document:
            case {"kind": "Deployment", "spec": spec}:
                yield document, spec["template"]
            case {"kind": "CronJob", "spec": {"jobTemplate": {"spec": spec}}}:
                yield document, spec["template"]
            case {"kind": "LeaderWorkerSet", "spec": {"leaderWorkerTemplate": templates}}:
                yield document, templates["leaderTemplate"]
                yield document, templates["workerTemplate"]
            case {"kind": "RayService", "spec": {"rayClusterConfig": config}}:
                yield document, config["headGroupSpec"]["template"]
                for group in config["workerGroupSpecs"]:
                    yield document, group["template"]


def containers(objects):
    for document, template in pods(objects):
        for container in template["spec"]["containers"]:
            yield document, template, container


def environment(container, objects) -> dict[str, str]:
    """Variables of a container: the image's, those of its ConfigMaps, its own. A secret key is just any."""
    maps = {document["metadata"]["name"]: document["data"] for document in objects if document["kind"] == "ConfigMap"}
    found = dict(image_environment("runtime"))
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]  # a KeyError: there is no such ConfigMap
    return found | {item["name"]: item.get("value", "key") for item in container.get("env", [])}


def configuration(command: list[str], variables: dict[str, str]) -> ServeConfig:
    """Of a command line and variables, as the server reads them; what it may not have yet is left out. Unknown variables are errors."""
    command = [re.sub(r"\$\((\w+)\)", lambda match: GIVEN[match[1]], word) for word in command]
    known = [word for word in command if word.removeprefix("--").partition("=")[0].replace("-", "_") not in MISSING]
    parsed = vars(make_parser().parse_args(known))
    unknown = {name for name in variables if name.startswith("PREHEAT_")} - {f"PREHEAT_{flag.upper()}" for flag in FLAGS}
    assert not unknown
    return load_serve_config(parsed, variables)


def served(objects):
    """Containers that run ``preheat`` itself, with their configurations."""
    for document, template, container in containers(objects):
        if document["kind"] != "RayService":
            check_command(container)
            yield document, template, container, configuration(container["args"], environment(container, objects))


def check_command(container) -> None:
    """The image's entry point, or a shell that hands the arguments on to it."""
    if "command" in container:
        shell, flag, script, name = container["command"]
        assert (shell, flag, name) == ("sh", "-c", "preheat") and script.endswith('&& exec preheat "$@"')


@pytest.mark.parametrize("folder", KUBERNETES)
def test_objects_are_what_kubernetes_takes(rendered, folder):
    assert [problem for document in rendered[folder] for problem in problems(document)] == []
    names = [(document["kind"], document["metadata"]["name"]) for document in rendered[folder]]
    assert len(names) == len(set(names))


def test_whole_objects_in_files_are_too():
    """Without kubectl too. What is no whole object is a patch, or is read by another program than Kubernetes."""
    checked = []
    for path in files(".yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if "kind" in document and path.name not in ("kustomization.yaml", "server.yaml"):
                assert problems(document) == [], path
                checked.append(document["kind"])
    assert {"Deployment", "HorizontalPodAutoscaler", "PodMonitor", "LeaderWorkerSet", "RayService", "CronJob"} <= set(checked)


def test_the_schemas_find_mistakes():
    service = yaml.safe_load((DEPLOY / "kubernetes/base/service.yaml").read_text())
    service["spec"]["ports"][0] |= {"targetport": "http", "port": "8000"}
    assert problems(service) == ["Service: Expected `int`, got `str` - at `$.spec.ports[0].port`"]
    service["spec"]["ports"][0]["port"] = 8000
    assert problems(service) == ["Service.spec.ports[0].targetport: no such field"]


@pytest.mark.parametrize("folder", KUBERNETES)
def test_servers_are_asked_where_they_answer(rendered, folder):
    """Options, ports and paths; a startup probe of minutes; time enough to drain."""
    for _, template, container, config in served(rendered[folder]):
        if container["args"][0] != "serve":
            continue
        assert config.host == "0.0.0.0" and config.warmup == "aot" and not config.no_http
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        if worker := template["metadata"]["labels"]["app.kubernetes.io/component"] == "worker":
            assert folder == "multi-host" and not ports
        else:
            assert (ports.pop("http"), ports.pop("grpc")) == (config.http_port, config.grpc_port)
            assert all(f":{port}" in " ".join(container["args"]) for port in ports.values())  # the coordinator's
        for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            assert path in ROUTES
            assert worker or (container[probe]["httpGet"]["path"], container[probe]["httpGet"]["port"]) == (path, "http")
        if not worker:
            assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600
        after = STOP_SECONDS + 1 + serve.LAST_ANSWERS + serve.LAST_SPANS  # the proxy's last answers, ours, the last traces
        needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + config.drain_timeout + after
        assert template["spec"]["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("folder", KUBERNETES)
def test_what_refers_to_another_finds_it(rendered, folder):
    """Selectors, named ports, targets, claims, volumes."""
    objects = rendered[folder]
    named = {(document["kind"], document["metadata"]["name"]): document for document in objects}
    for document in objects:
        spec = document.get("spec", {})
        match document["kind"]:
            case "Service":
                template = the_template(objects, spec["selector"])
                assert {port["targetPort"] for port in spec["ports"]} <= port_names(template)
            case "PodDisruptionBudget":
                the_template(objects, spec["selector"]["matchLabels"])
            case "PodMonitor":
                template = the_template(objects, spec["selector"]["matchLabels"])
                [endpoint] = spec["podMetricsEndpoints"]
                assert endpoint["port"] in port_names(template) and endpoint["path"] in ROUTES
            case "Deployment":
                assert the_template(objects, spec["selector"]["matchLabels"]) is spec["template"]
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                assert "replicas" not in named[target["kind"], target["name"]]["spec"]  # each apply would set them back
                assert all(metric["pods"]["metric"]["name"] in METRICS for metric in spec["metrics"])
    for _, template in pods(objects):
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        mounts = {mount["name"] for container in template["spec"]["containers"] for mount in container.get("volumeMounts", [])}
        assert mounts == set(volumes)
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume}
        assert claims <= {name for kind, name in named if kind == "PersistentVolumeClaim"} | {"preheat-model"}  # the user's


def the_template(objects, labels):
    [template] = [each for _, each in pods(objects) if labels.items() <= each.get("metadata", {}).get("labels", {}).items()]
    return template


def port_names(template) -> set[str]:
    return {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}


@pytest.mark.parametrize("folder", KUBERNETES)
def test_pods_can_do_little(rendered, folder):
    for document, template, container in containers(rendered[folder]):
        assert template["spec"]["enableServiceLinks"] is False  # else Services' names make PREHEAT_* variables
        pod, own = template["spec"]["securityContext"], container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"]["drop"] == ["ALL"]
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        tpu = "google.com/tpu" in container["resources"]["limits"]
        assert own["capabilities"].get("add", []) == (["SYS_RESOURCE"] if tpu else [])
        if document["kind"] != "RayService":  # Ray writes where it likes
            assert own["readOnlyRootFilesystem"] is True
        if not (tpu or document["kind"] == "CronJob"):
            assert pod["runAsNonRoot"] is True and pod["runAsUser"] == 10001


@pytest.mark.parametrize("folder", KUBERNETES)
def test_who_shares_a_store_is_one_user_and_makes_the_folder_itself(rendered, folder):
    users = set()
    for _, template, container in containers(rendered[folder]):
        mounts = {mount["name"]: pathlib.Path(mount["mountPath"]) for mount in container.get("volumeMounts", [])}
        variables = environment(container, rendered[folder])
        if "store" in mounts:
            assert mounts["store"] in pathlib.Path(variables["PREHEAT_WARMUP_CACHE"]).parents
            security = template["spec"]["securityContext"]
            assert security["fsGroupChangePolicy"] == "OnRootMismatch" and security["fsGroup"]
            users.add(security["runAsUser"])
    assert len(users) == (0 if folder == "overlays/cpu" else 1)


def test_a_folder_inside_of_a_volume_that_others_can_write_is_trusted(tmp_path):
    """As `fsGroup` leaves a volume; its own root would not do."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2775)
    assert Folder.open(volume, "programs") is None
    made = Folder.open(volume / "store", "programs")
    assert made is not None and made.writable


def test_programs_are_built_with_the_options_they_are_served_with(rendered):
    configs = {document["kind"]: config for document, _, _, config in served(rendered["overlays/tpu"])}
    shape = {"model", "tp", "slots", "max_len", "memory", "warmup_cache", "quantize", "dtype"}
    assert all(getattr(configs["CronJob"], name) == getattr(configs["Deployment"], name) for name in shape)
    assert configs["CronJob"].memory is not None  # the default follows from the machine


def test_the_metric_of_the_autoscaler_is_the_adapters():
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/scaling/prometheus-adapter.yaml").read_text())
    scaler = yaml.safe_load((DEPLOY / "kubernetes/components/scaling/autoscaler.yaml").read_text())
    [rule], [metric] = adapter["rules"]["custom"], scaler["spec"]["metrics"]
    assert rule["seriesQuery"].partition("{")[0] == metric["pods"]["metric"]["name"]


def test_ray_serves_what_there_is(rendered):
    [service] = [document for document in rendered["ray"] if document["kind"] == "RayService"]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, attribute = application["import_path"].partition(":")
    assert attribute and application["route_prefix"] == "/"
    for _, _, container in containers([service]):
        configuration(["serve"], environment(container, [service]))
    if "ray" not in MISSING:
        assert importlib.util.find_spec(module), f"deploy/kubernetes/ray names {module}: name the application of `preheat ray`"


def test_the_readme_says_what_is_missing():
    for name, words in EXPECTED.items():
        still = any(other in MISSING for other in EXPECTED if EXPECTED[other] == words)
        assert (words in README) == still, f"{name}: deploy/README.md has to say {words!r} as long as that is so, and no longer"


# The image.


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions, those of the stages it begins with first. The last has the name ``""``."""
    lines = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    current = found.setdefault("ARG", [])
    for line in filter(str.strip, lines):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            current = found[alias] = list(found.get(base, []))
        current.append((name, rest.strip()))
    return found


def arguments(stage: str) -> dict[str, str]:
    return dict(rest.split("=", 1) for name, rest in [*stages()["ARG"], *stages()[stage]] if name == "ARG")


def image_environment(stage: str) -> dict[str, str]:
    known = arguments(stage)
    pairs = [pair.split("=", 1) for name, rest in stages()[stage] if name == "ENV" for pair in shlex.split(rest)]
    return {name: re.sub(r"\$\{(\w+)\}", lambda match: known[match[1]], value) for name, value in pairs}


@pytest.mark.parametrize("stage", ["runtime", ""])
def test_images_run_as_nobody_and_serve_on_the_ports_they_name(stage):
    assert [rest for name, rest in stages()[stage] if name == "USER"][-1] == "10001:10001"
    config = configuration(shlex.split(" ".join(json.loads(instruction(stage, "CMD")))), image_environment(stage))
    assert json.loads(instruction(stage, "ENTRYPOINT")) == ["preheat"]
    assert instruction(stage, "EXPOSE").split() == [str(config.http_port), str(config.grpc_port)]
    assert config.host == "0.0.0.0" and config.warmup == "aot" and image_environment(stage)["HF_HUB_OFFLINE"] == "1"
    if stage == "":
        assert config.memory is not None and config.model == ServeConfig().model  # the memory is not the builder's
    path = re.search(r"'(/\w+)'", instruction(stage, "HEALTHCHECK"))
    assert path and path[1] == "/ready" and path[1] in ROUTES


def instruction(stage: str, wanted: str) -> str:
    return [rest for name, rest in stages()[stage] if name == wanted][-1]


def test_what_is_built_into_the_image_is_what_it_serves():
    """Nothing between building and serving changes an option."""
    assert image_environment("artifacts") == image_environment("")
    [build] = [rest for name, rest in stages()["artifacts"] if name == "RUN" and "preheat build" in rest]
    command = re.search(r"preheat (build .*?) &&", build)[1].replace('${TARGET:+--target "$TARGET"}', "--target v5e-4")
    assert make_parser().parse_args(shlex.split(command)).target == "v5e-4"
    folders = {rest.split()[-1] for name, rest in stages()[""] if name == "COPY" and "--from=artifacts" in rest}
    variables = image_environment("")
    assert folders == {variables["PREHEAT_WARMUP_CACHE"], variables["XDG_CACHE_HOME"]}
    assert pathlib.Path(variables["XDG_CACHE_HOME"]) in pathlib.Path(variables["HF_HOME"]).parents
    assert set(re.search(r"chmod -R u=rwX,go=rX (.*)", build)[1].split()) == folders


def test_the_context_holds_what_is_installed():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert kept == packages | {"pyproject.toml", "setup.py", project["project"]["readme"], "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)


def test_build_arguments_name_extras_and_options_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"tpu", "ray", "otel"} <= set(extras)
    table = set(re.findall(r"`([A-Z_]+)`", "\n".join(re.findall(r"^\| (`[A-Z].*?) \|", README, re.MULTILINE))))
    assert table == {name for stage in stages() for name in arguments(stage)}


# Compose, and the README's commands.


def test_compose_is_valid(tmp_path):
    """By the schema of the compose specification, which finds mistakes."""

    def check(path):
        return check_jsonschema.main(["--builtin-schema", "vendor.compose-spec", "--quiet", str(path)], standalone_mode=False)

    assert check(DEPLOY / "compose.yaml") == 0
    (tmp_path / "compose.yaml").write_text((DEPLOY / "compose.yaml").read_text().replace("read_only: true\n", "read_onyl: true\n"))
    assert check(tmp_path / "compose.yaml") == 1


def test_compose_runs_what_there_is():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        stage = build.get("target", "")
        config = configuration(["serve"], image_environment(stage) | service.get("environment", {}))
        ports = {int(port.rsplit(":", 1)[1]) for port in service["ports"]}
        assert ports == {config.http_port, config.grpc_port}
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace >= config.drain_timeout + STOP_SECONDS + 1 + serve.LAST_ANSWERS + serve.LAST_SPANS
        assert config.memory is not None and config.memory + 2 * 2**30 <= int(service["mem_limit"].removesuffix("g")) * 2**30
        for volume in service.get("volumes", []):
            if volume["source"] == "store":
                assert pathlib.Path(volume["target"]) in config.warmup_cache.parents


@pytest.mark.parametrize("line", re.findall(r"^\$ (.*)", README, re.MULTILINE))
def test_commands_of_the_readme(line):
    words = shlex.split(line.removeprefix("MODEL=/srv/llama "))
    match words:
        case ["docker", "build", *rest]:
            assert (ROOT / rest[rest.index("-f") + 1]).samefile(DEPLOY / "Dockerfile") and rest[-1] == "."
            given = [rest[index + 1].partition("=")[0] for index, word in enumerate(rest) if word == "--build-arg"]
            assert set(given) <= {name for stage in stages() for name in arguments(stage)}
            assert "--target" not in rest or rest[rest.index("--target") + 1] in stages()
        case ["docker", "compose", "-f", file, *_, service]:
            assert service in yaml.safe_load((ROOT / file).read_text())["services"]
        case ["kubectl", "apply", "-k", folder]:
            assert str(pathlib.Path(folder).relative_to("deploy/kubernetes")) in KUBERNETES
        case ["kubectl", "create", "secret", "generic", name, literal]:
            text = (DEPLOY / "kubernetes/base/deployment.yaml").read_text()
            assert f"{{name: {name}, key: {literal.removeprefix('--from-literal=').partition('=')[0]}," in text
        case ["kubectl", "create", "job", _, source]:
            jobs = yaml.safe_load((DEPLOY / "kubernetes/overlays/tpu/build.yaml").read_text())
            assert source == f"--from=cronjob/{jobs['metadata']['name']}"
        case ["docker", "run", *_, image]:
            assert image == "preheat"
        case _:
            raise AssertionError(f"no rule for {line}")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (DEPLOY / target).exists(), target
