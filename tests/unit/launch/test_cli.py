"""The command line: exit status, one-line errors, and a cheap --help."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afd.config.deployment import Deployment, load_config
from afd.config.roles import load_role
from afd.control.authority import member_ids
from afd.control.keys import CurveKeys, load_client
from afd.control.messages import Member, Members, Seat
from afd.errors import ConfigError
from afd.host.package_data import data_folder
from afd_gateway.inherited import Inherited, inherited
from afd_launch import cli
from afd_launch.ctl import table
from afd_launch.demo import TRAINED, hints
from afd_launch.private_folder import private_folder
from afd_launch.process import Command, RoleProcess
from afd_launch.role import standalone_spec
from afd_launch.roles_of_host import (
    OPERATOR_KEYS,
    Ports,
    held_addresses,
    role_specs,
    stages,
    with_keys,
)
from afd_launch.serve import check_machine
from afd_launch.standby import ATTENTION, FFN

REPO = Path(__file__).parents[3]


def afd(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "afd_launch.cli", *argv], capture_output=True, text=True, timeout=60
    )


def write(tmp_path: Path, text: str = "model: m\n") -> str:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    return str(path)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['afd', '--help']\n"
        "from afd_launch import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'numpy', 'zmq', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout and "doctor" in done.stdout
    # CPU time, so that a busy machine does not matter; usually about 0.1 s.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 2.0


def test_error_is_one_line_and_exit_status_2(tmp_path):
    done = afd("serve", str(tmp_path / "absent.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("afd: error: no such file: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: m", "unknown key modle in d.yaml; did you mean model?"),
        ("model: m", "is not a folder; give the path of a Hugging Face checkpoint"),
    ],
)
def test_serve_reports_mistakes_of_file_and_model(tmp_path, capsys, text, message):
    assert cli.main(["serve", write(tmp_path, text)]) == 2
    assert message in capsys.readouterr().err


def test_roles_started_by_hand_need_a_file_and_an_address(tmp_path, capsys, monkeypatch):
    assert cli.main(["ffn"]) == 2
    assert "afd ffn needs a deployment file" in capsys.readouterr().err
    monkeypatch.setattr("afd.config.resolve.check_model", lambda deployment: None)
    assert cli.main(["ffn", write(tmp_path)]) == 2
    assert "control.address is auto, which only afd serve can choose" in capsys.readouterr().err
    address = "tcp://127.0.0.1:5"
    assert cli.main(["ffn", write(tmp_path), "--control", address, "--index", "1"]) == 2
    assert "--index 1 does not exist with ffn.instances = 1; use 0 to 0" in capsys.readouterr().err
    assert cli.main(["ffn", write(tmp_path), "--control", address, "--rank", "1"]) == 2
    assert "--rank 1 does not exist with ffn.tp = 1; use 0 to 0" in capsys.readouterr().err
    assert cli.main(["ffn", write(tmp_path), "--control", address]) == 2
    assert "roles started by hand need keys; make a key file with `afd keys FILE`" in (
        capsys.readouterr().err
    )


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("afd_launch.doctor.doctor", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_usage_mistakes_exit_with_2(capsys):
    for argv in ([], ["nonsense"], ["ctl", "status"], ["keys"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 2
    assert "usage: afd" in capsys.readouterr().err


def test_keys_file_is_made_once(tmp_path, capsys):
    path = tmp_path / "control.keys"
    assert cli.main(["keys", str(path)]) == 0
    made = CurveKeys.load(path)
    assert cli.main(["keys", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert CurveKeys.load(path) == made


def test_keys_of_one_member(tmp_path, capsys):
    whole, own = tmp_path / "control.keys", tmp_path / "ffn-0.1.keys"
    assert cli.main(["keys", str(whole)]) == 0
    assert cli.main(["keys", str(own), "--member", "ffn-0.1", "--of", str(whole)]) == 0
    assert load_client(own) == CurveKeys.load(whole).member("ffn-0.1")
    assert own.stat().st_mode & 0o777 == 0o600
    assert cli.main(["keys", str(own), "--member", "ffn-0.1"]) == 2
    assert "give both or neither" in capsys.readouterr().err


def test_unknown_benchmark(capsys):
    assert cli.main(["bench", "nonsense"]) == 2
    assert "benchmark 'nonsense' is unknown" in capsys.readouterr().err


def test_doctor_reports_a_bad_host(monkeypatch, capsys):
    from afd_launch import doctor

    good = doctor.Finding("ok", "cores", "2 of 2 usable")
    bad = doctor.Finding("bad", "vllm", "cannot be imported: no module")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: good, lambda: bad))
    assert cli.main(["doctor"]) == 1
    assert "bad   vllm             cannot be imported" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "CHECKS", (lambda: good, doctor._proc_fd))
    assert cli.main(["doctor"]) == 0


# -- the commands of a deployment


def deployment(**sections) -> Deployment:
    return Deployment.from_plain({"model": "/m", **sections})


def test_ports_of_the_file_and_free_ones():
    wanted = deployment(gateway={"port": 0}, attention={"port": 0, "instances": 2})
    with held_addresses(wanted) as ports:
        assert ports.gateway > 0 and all(ports.attention) and len(set(ports.attention)) == 2
        assert ports.control_address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ({"gateway": {"port": None}, "attention": {"port": 0}}, "gateway.port"),
        ({"gateway": {"port": 0}, "attention": {"port": None}}, "attention.port"),
    ],
)
def test_a_port_in_use_is_refused_before_anything_starts(section, setting):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        filled = {
            name: {key: port if value is None else value for key, value in keys.items()}
            for name, keys in section.items()
        }
        refused = pytest.raises(ConfigError, match=f"port {port} is in use.*{setting}")
        with refused, held_addresses(deployment(**filled)):
            pass


def test_stages_start_control_first_and_pass_role_files(tmp_path):
    plan = deployment(ffn={"instances": 2}, deadlines={"drain_s": 7})
    specs = role_specs(plan, Ports(8000, (8100,), "tcp://127.0.0.1:5"), [0, 1, 2, 3])
    found = stages(specs, tmp_path)
    names = [[command.name for command in stage.commands] for stage in found]
    assert names == [["control-0"], ["ffn-0", "ffn-1"], ["attention-0"], ["gateway-0"]]
    assert found[-1].stop_s > 7
    attention = load_role(tmp_path / "attention-0.json")
    assert attention.cpus == (0, 1) and attention.api_port == 8100
    assert [load_role(tmp_path / f"ffn-{j}.json").cpus for j in (0, 1)] == [(2,), (3,)]
    commands = {command.name: command for stage in found for command in stage.commands}
    assert commands["attention-0"].env["OMP_NUM_THREADS"] == "2"
    assert commands["gateway-0"].env["OMP_NUM_THREADS"] == "1"
    assert commands["ffn-1"].argv[-2:] == ("--role-file", str(tmp_path / "ffn-1.json"))


@pytest.mark.parametrize(
    ("setting", "waits"), [(True, (FFN, ATTENTION)), ("ffn", (FFN, ())), (False, ((), ()))]
)
def test_which_roles_a_process_waits_for(tmp_path, setting, waits):
    plan = deployment(restart={"standby": setting})
    specs = role_specs(plan, Ports(8000, (8100,), "tcp://127.0.0.1:5"), [0, 1])
    commands = {c.name: c for stage in stages(specs, tmp_path) for c in stage.commands}
    assert (commands["ffn-0"].standby, commands["attention-0"].standby) == waits
    assert commands["gateway-0"].standby == commands["control-0"].standby == ()
    roles = ["ffn-0", "attention-0"]
    assert [name for name in commands if commands[name].forked] == [
        name for name in roles if commands[name].standby
    ]


def test_gateway_processes_inherit_one_port(tmp_path):
    plan = deployment(gateway={"processes": 2})
    specs = role_specs(plan, Ports(8000, (8100,), "tcp://127.0.0.1:5"), [0, 1])
    port = Inherited(listener=11, counts=12, answers=13)
    commands = {c.name: c for stage in stages(specs, tmp_path, port) for c in stage.commands}
    for name in ("gateway-0", "gateway-1"):
        assert commands[name].descriptors == (11, 12, 13)
        assert inherited(commands[name].env) == port
        assert load_role(tmp_path / f"{name}.json").api_port == 8000
    assert commands["attention-0"].descriptors == ()
    assert inherited(commands["attention-0"].env) is None


def test_a_role_inherits_the_descriptors_of_its_command():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import socket; print(socket.socket(fileno={listener.fileno()}).getsockname()[1])"
        command = Command("x", (sys.executable, "-c", code), descriptors=(listener.fileno(),))
        process = RoleProcess.start(command)
        while process.exit_code() is None:
            time.sleep(0.01)
        assert int(os.read(process.output, 99)) == listener.getsockname()[1]
        process.close()


def test_a_gateway_process_by_hand_has_a_number_below_gateway_processes():
    plan = deployment(gateway={"processes": 2}, control={"address": "tcp://h:1", "keys": "k"})
    assert standalone_spec(plan, "gateway", 1, None).id == "gateway-1"
    with pytest.raises(ConfigError, match=r"--index 2 does not exist with gateway\.processes = 2"):
        standalone_spec(plan, "gateway", 2, None)
    assert {"gateway-0", "gateway-1"} <= set(member_ids(plan))


def test_a_role_by_hand_takes_its_settings_from_the_file():
    plan = deployment(
        attention={"instances": 2, "port": 9000, "cpus": [[0], [1, 2]]},
        control={"address": "tcp://h:1", "keys": "k"},
    )
    spec = standalone_spec(plan, "attention", 1, None)
    assert (spec.api_port, spec.cpus, spec.control_address) == (9001, (1, 2), "tcp://h:1")
    assert standalone_spec(plan, "gateway", 0, "tcp://i:2").control_address == "tcp://i:2"


def test_every_role_gets_keys_of_its_own(tmp_path):
    specs = role_specs(deployment(ffn={"tp": 2}), Ports(1, (2,), "tcp://127.0.0.1:5"), [0, 1, 2])
    specs = with_keys(specs, tmp_path)
    stages(specs, tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    whole = CurveKeys.load(tmp_path / "control-0.keys")
    for spec in (
        load_role(tmp_path / f"{spec.id}.json") for spec in specs if spec.role != "control"
    ):
        own = load_client(spec.keys_file)
        assert own == whole.member(spec.id) == load_client(tmp_path / "control-0.keys", spec.id)
        text = spec.keys_file.read_text()
        assert whole.server_secret not in text and whole.client_secret not in text
    assert load_client(tmp_path / OPERATOR_KEYS) == whole.operator


def test_given_keys_are_used(tmp_path):
    whole = CurveKeys.generate()
    whole.save(tmp_path / "given")
    plan = deployment(control={"keys": str(tmp_path / "given")})
    specs = role_specs(plan, Ports(1, (2,), "tcp://127.0.0.1:5"), [0])
    (tmp_path / "run").mkdir()
    assert {CurveKeys.load(s.keys_file) for s in with_keys(specs[:1], tmp_path / "run")} == {whole}


def test_the_private_folder_is_private_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with private_folder() as (path, _watchdog):
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        (path / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_status_table():
    member = Member("attention", 0, 3, api_url="http://h:8100", pid=42, state="ready")
    text = table(Members(members=(member,), depth=2, draining=True))
    assert text.splitlines()[1].split() == ["attention-0", "ready", "3", "42", "http://h:8100"]
    assert text.splitlines()[-1] == "depth: 2, draining"


@pytest.mark.parametrize("undo", [False, True])
def test_drain_and_undo(monkeypatch, capsys, undo):
    asked = []

    def drain(address, _keys, *, on):
        asked.append((address, on))
        return Members(draining=on)

    monkeypatch.setattr("afd_launch.ctl.operator.drain", drain)
    monkeypatch.setattr("afd_launch.ctl.operator_keys", lambda _address, _file: None)
    command = ["ctl", "--control", "tcp://127.0.0.1:5", "drain", *(["--undo"] if undo else [])]
    assert cli.main(command) == 0
    assert asked == [("tcp://127.0.0.1:5", not undo)]
    assert ("draining" in capsys.readouterr().out) == (not undo)


def test_demo_hints_can_be_pasted():
    text = hints("http://127.0.0.1:8000", "demo")
    curl = next(line for line in text.splitlines() if "curl" in line)
    assert "http://127.0.0.1:8000/v1/chat/completions" in curl
    request = json.loads(curl.split("-d '")[1].rstrip("'"))
    assert request["model"] == "demo" and request["messages"][0]["role"] == "user"
    python = next(line for line in text.splitlines() if "python -c" in line)
    compile(python.split('-c "')[1].rstrip('"'), "hint", "exec")


def test_demo_config_names_the_demo():
    deployment = load_config(REPO / "afd_launch/data/demo/demo.yaml")
    assert (deployment.served_model_name, deployment.model) == ("demo", TRAINED)


@pytest.mark.parametrize("name", ["bench", "eval"])
def test_help_of_commands_of_another_package(name):
    done = afd(name, "--help")
    assert done.returncode == 0 and f"afd {name}" in done.stdout


def test_an_unknown_option_is_a_usage_mistake(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--nonsense"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


EXAMPLES = sorted((data_folder("afd_launch") / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_good(path, capsys):
    assert cli.main(["serve", "--check-file", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"{path} is good: model afd-tiny-chat" in told
    assert ("memory per GPU: attention" in told) == (path.stem == "two-hosts-gpu")


def test_check_with_a_host_looks_at_this_machine(capsys):
    (path,) = [path for path in EXAMPLES if path.stem == "two-hosts"]
    assert cli.main(["serve", "--check", str(path), "--host", "b"]) == 2
    assert "host b has the address 10.0.0.2, which is not one of" in capsys.readouterr().err
    check_machine(load_config(path, ["hosts=[{name: a, address: 127.0.0.1}]"]), "a")


@pytest.mark.parametrize(
    ("words", "action", "member"),
    [
        (["add", "attention"], "add", "attention"),
        (["remove", "attention-1", "--wait", "9"], "remove", "attention-1"),
        (["restart", "ffn-0"], "restart", "ffn-0"),
        (["restart", "--rolling"], "restart", None),
        (["add", "ffn"], "add", "ffn"),
        (["drain", "attention-1"], "drain", "attention-1"),
        (["drain"], "drain", None),
    ],
)
def test_actions_on_instances(monkeypatch, words, action, member):
    calls = []
    monkeypatch.setattr("afd_launch.ctl.run_ctl", lambda *a, **kw: calls.append((a, kw)) or 0)
    assert cli.main(["ctl", "--control", "tcp://h:1", *words]) == 0
    (((given, *_), known),) = calls
    assert (given, known["member"]) == (action, member)
    assert known["wait_s"] == (9.0 if "9" in words else 0.0 if action == "drain" else 300.0)


@pytest.mark.parametrize("words", [["add"], ["restart"], ["restart", "ffn-0", "--rolling"]])
def test_actions_that_do_not_exist(capsys, words):
    with pytest.raises(SystemExit):
        cli.main(["ctl", "--control", "tcp://h:1", *words])
    assert "error" in capsys.readouterr().err


def test_the_status_table_shows_what_is_wanted():
    member = Member("attention", 1, 3, state="ready")
    text = table(Members(members=(member,), seats=(Seat("attention-1", "remove"),)))
    assert "ready, to remove" in text
