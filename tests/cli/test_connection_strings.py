"""Connection strings that lead nowhere: what is wrong with them is told before and apart from a server that is down."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_program import one_error

from pgsub.common.connections import conninfo, conninfo_check
from pgsub.common.errors import PublisherUnavailable, UsageError
from pgsub.publisher import connect as publisher

WORDS = ("create", "s", "--publication", "p")
NOBODY = "host=127.0.0.1 port=1"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("host=a port=abc", 'invalid integer value "abc" for connection option "port"'),
        ("host=a port=70000", 'invalid port number: "70000"'),
        ("host=a,b port=1,2,3", "could not match 3 port numbers to 2 hosts"),
        ("host=a hostaddr=127.0.0.1,127.0.0.2", "could not match 1 host names to 2 hostaddr values"),
        ("host=a sslmode=perhaps", 'invalid sslmode value: "perhaps"'),
        ("host=a connect_timeout=soon", 'invalid integer value "soon" for connection option "connect_timeout"'),
        ("host=a keepalives=yes", 'invalid integer value "yes" for connection option "keepalives"'),
    ],
)
@pytest.mark.parametrize("side", ["publisher", "target"])
def test_a_value_that_libpq_refuses_is_a_usage_error_that_names_it(pgsub, folder, side, wrong, said):
    sides = {"publisher": NOBODY, "target": NOBODY, side: wrong}
    ended = pgsub(*WORDS, "--connection", sides["publisher"], "--target", sides["target"])
    one_error(ended, 2, f"invalid connection string for the {side}: {said}")
    assert not folder.exists()


@pytest.mark.parametrize("option", ["--back-connection", "--back-target"])
@pytest.mark.parametrize("wrong", ["host=a port=abc", "hst=a", "host=a sslpassword=S3NT"])
def test_of_a_way_back_they_are_refused_before_a_server_is_asked(pgsub, store, option, wrong):
    said = one_error(pgsub("switchover", "orders", "--yes", option, wrong), 3 if "S3NT" in wrong else 2)
    assert f"way back ({option})" in said and "S3NT" not in said


@pytest.mark.parametrize(
    ("rest", "said"), [("/1NEL@db1", "its port is not a number"), ("@1NEL@db1", 'its host contains "@"')]
)
def test_of_a_uri_port_and_host_are_not_shown_for_they_may_be_the_rest_of_a_password(pgsub, rest, said):
    ended = pgsub(*WORDS, "--target", NOBODY, "--connection", f"postgresql://repl:S3NT{rest}/shop")
    shown = one_error(ended, 2, said, '"/" as %2F')
    assert "S3NT" not in shown and "1NEL" not in shown


@pytest.mark.parametrize(
    "right",
    [
        *("", "host=/tmp", "hostaddr=127.0.0.1", "host=a,b port=5432", "host=a,b port=1,2 hostaddr=127.0.0.1,::1"),
        *(
            "host=a port='' sslmode=verify-full connect_timeout=' 5'",
            "service=nobody_defined",
            "service=nobody_defined port=1,2 sslnegotiation=direct",
            "host=a gssencmode=require",
            "postgresql://a:1,b:2/c",
            "postgresql://%2Ftmp%2Fa%40b/c",
            "postgresql://%40abstract/c",
        ),
    ],
)
def test_what_libpq_takes_is_taken(right):
    conninfo_check.check(conninfo.parse(right, "target"), "target", uri="://" in right)


def test_nothing_is_connected_to_and_no_passfile_is_read_while_values_are_looked_at(tmp_path, monkeypatch, capfd):
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:*:word\n")
    passfile.chmod(0o644)  # libpq warns of it where it reads it
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    with pytest.raises(UsageError):
        conninfo_check.check({"host": "a", "port": "abc"}, "target")
    conninfo_check.check({"host": "a", "port": "1"}, "target")
    assert capfd.readouterr().err == ""


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service file."""
    file = tmp_path / "services.conf"
    file.write_text("[shop]\nhost=127.0.0.1\nport=1\n# [old]\n[copy]\nport=1\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    return file


_ATTRS = "target_session_attrs"


@pytest.mark.parametrize(
    ("given", "service", "environment", "used"),
    [
        ("read-write", None, None, "primary"),
        (None, "read-write", None, "primary"),
        (None, None, "read-write", "primary"),
        (None, "read-write", "any", "primary"),
        ("read-write", "any", "any", "primary"),
        # what goes before is left as it is
        ("any", "read-write", "read-write", "any"),
        *[(one, None, "read-write", one) for one in ("primary", "standby", "prefer-standby", "read-only")],
        (None, "standby", "read-write", None),
        (None, None, "standby", None),
    ],
)
def test_a_server_that_accepts_writes_is_asked_only_whether_it_is_the_primary(
    services: Path, monkeypatch: pytest.MonkeyPatch, given: str, service: str, environment: str, used: str
) -> None:
    """For the default of its sessions says no more than that clients are kept from writing."""
    named = "host=a" if service is None else "service=ha"
    services.write_text(f"[ha]\nhost=a\n{_ATTRS}={service}\n")
    monkeypatch.delenv("PGTARGETSESSIONATTRS", raising=False)
    if environment is not None:
        monkeypatch.setenv("PGTARGETSESSIONATTRS", environment)
    params = conninfo.parse(named if given is None else f"{named} {_ATTRS}={given}", "target")
    stored = dict(params)
    assert conninfo.usable(params).get(_ATTRS) == used
    assert params == stored and params.get(_ATTRS) == given


def test_an_unknown_service_says_where_services_are_looked_for_and_which_there_are(pgsub, services):
    ended = pgsub(*WORDS, "--connection", NOBODY, "--target", "service=nosuch")
    said = one_error(ended, 5, 'definition of service "nosuch" not found', "service= in --target")
    assert f'looked for in "{services}"' in said and 'defines "shop", "copy".' in said
    with pytest.raises(PublisherUnavailable) as raised:
        publisher.connect("service=nosuch", application_name="s")
    assert f'looked for in "{services}"' in raised.value.detail and "service= in --connection" in raised.value.hint


def test_a_service_file_that_is_not_there_is_named(pgsub, services):
    services.unlink()
    ended = pgsub(*WORDS, "--connection", NOBODY, "--target", "service=shop")
    assert f'looked for in "{services}"' in one_error(ended, 5, "not found")
