"""The line and the ceremony, without sockets: what joins, what does not, and what it costs."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import certificates, wire
from gpulayer_mesh.core import joining as j
from gpulayer_mesh.core.certificates import id_of
from gpulayer_mesh.core.roster import Roster, entry, seal_roster, with_member
from gpulayer_mesh.core.types import Address, Role
from gpulayer_mesh.errors import IllegalTransitionError, JoinError, RemoteProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

WALL = datetime(2024, 1, 1, tzinfo=UTC)
CA = Ed25519PrivateKey.from_private_bytes(b"c" * 32)
MESH = id_of(CA)
CA_DER = certificates.issue_ca(CA, wall=WALL, serial=1)
FOUNDER = Ed25519PrivateKey.from_private_bytes(b"f" * 32).public_key().public_bytes_raw()
FIRST = Roster(MESH, 1, (entry(FOUNDER, "laptop", tuple(Role)),))
SECRET = b"s" * 16
INVITATION = j.Invitation(("192.0.2.1", "2001:db8::1"), 40123, MESH, SECRET)
CHANNEL, OTHER_CHANNEL = b"1" * 32, b"2" * 32


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def inviter(uses: int = 1) -> j.Inviter:
    return j.Inviter(mesh=MESH, secret=SECRET, channel=CHANNEL, uses=uses, now=0.0)


def joiner(number: int = 1, *, channel: bytes = CHANNEL, secret: bytes = SECRET) -> j.Joiner:
    invitation = j.Invitation(("192.0.2.1",), 1, MESH, secret)
    return j.Joiner(
        invitation,
        key(number),
        name=f"box-{number}",
        addresses=(Address("192.0.2.9", 7400),),
        channel=channel,
        nonce=bytes(32),
    )


def admission(request: j.JoinRequest, *, ca: Ed25519PrivateKey = CA) -> j.Admission:
    first = Roster(id_of(ca), 1, FIRST.entries)
    roster = with_member(first, entry(request.public_key, request.name, (Role.WORKER,)))
    return j.Admission(
        certificates.issue_node(ca, request.public_key, wall=WALL, serial=2),
        certificates.issue_ca(ca, wall=WALL, serial=1),
        seal_roster(ca, roster),
        {"ab" * 32: (Address("192.0.2.1", 7400),)},
    )


def challenge(host: j.Inviter, attempt: int, who: j.Joiner, now: float = 0.0) -> bytes:
    nonce = attempt.to_bytes(32, "big")
    [reply] = host.handle(now, j.HelloReceived(attempt, who.hello(), nonce))
    assert isinstance(reply, j.Reply)
    return reply.data


def refusal(effects: list[j.Effect]) -> str:
    [reply] = [e for e in effects if isinstance(e, j.Reply)]
    assert reply.last
    return str(wire.unpack(reply.data)["refused"])


def ceremony(host: j.Inviter, who: j.Joiner, attempt: int = 1, *, new: bool = True) -> j.Admission:
    proof = who.prove(challenge(host, attempt, who))
    [admit] = host.handle(0.0, j.ProofReceived(attempt, proof))
    assert isinstance(admit, j.Admit)
    given = replace(admission(admit.request), new=new)
    effects = host.handle(0.0, j.Admitted(attempt, given))
    assert isinstance(effects[0], j.Reply)
    host.check()
    return who.accept(effects[0].data)


# --- the line ------------------------------------------------------------------------------------


def test_line_is_one_token_no_shell_touches_and_comes_back_equal() -> None:
    line = j.write_line(INVITATION)
    assert re.fullmatch(r"gpl1-[a-z2-7]+", line)
    assert j.read_line(line) == INVITATION
    assert j.read_line(f"  {line[:40]}\n{line[40:]}\r\n".upper()) == INVITATION


def test_line_with_eight_long_addresses_stays_pasteable() -> None:
    hosts = tuple(f"2001:db8:1111:2222:3333:4444:5555:666{i}" for i in range(8))
    line = j.write_line(j.Invitation(hosts, 65535, MESH, SECRET))
    assert j.read_line(line).hosts == hosts
    assert len(line) < 400


def test_every_truncation_is_called_cut_off() -> None:
    line = j.write_line(INVITATION)
    for length in range(len("gpl1-"), len(line)):
        with pytest.raises(JoinError, match=f"cut off: {length} of"):
            j.read_line(line[:length])
    with pytest.raises(JoinError, match=f"cut off: {len(line) - 9} of {len(line)} characters"):
        j.read_line(line[:-9])


def test_every_changed_character_is_noticed(rng: random.Random) -> None:
    line = j.write_line(INVITATION)
    for at in range(len("gpl1-"), len(line) - 1):  # the last one carries unused bits
        other = rng.choice([c for c in "abcdefghijklmnopqrstuvwxyz234567" if c != line[at]])
        with pytest.raises(JoinError, match=r"damaged|cut off"):
            j.read_line(line[:at] + other + line[at + 1 :])


def test_added_characters_are_noticed() -> None:
    line = j.write_line(INVITATION)
    for more in ("a", "7", "ab", "gpl1-", line):
        with pytest.raises(JoinError, match=r"damaged|cannot have"):
            j.read_line(line + more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not start with"),
        ("gpl1-xxxx", "damaged"),
        ("hello", "does not start with"),
        ("gpl1-", "cut off"),
        ("gpl1-ab!cd", "characters it cannot have"),
        ("gpl1-äöü", "characters it cannot have"),
        ("gpl1-" + "a" * 5000, "too many"),
    ],
)
def test_what_is_no_line_is_told_so(text: str, words: str) -> None:
    with pytest.raises(JoinError, match=words):
        j.read_line(text)


@given(st.binary(max_size=120))
@settings(max_examples=300, deadline=None)
def test_line_with_a_good_checksum_over_nonsense_is_refused(payload: bytes) -> None:
    import base64
    import hashlib

    framed = len(payload).to_bytes(2, "big") + hashlib.sha256(payload).digest()[:4] + payload
    with pytest.raises(JoinError, match="another version"):
        j.read_line("gpl1-" + base64.b32encode(framed).decode().rstrip("="))


# --- the ceremony --------------------------------------------------------------------------------


def test_joiner_with_the_line_is_admitted_once() -> None:
    host = inviter()
    got = ceremony(host, joiner())
    assert got.ca_certificate == CA_DER
    assert got.peers == {"ab" * 32: (Address("192.0.2.1", 7400),)}
    assert host.state is j.InviteState.USED_UP
    assert host.next_timeout() is None
    with pytest.raises(JoinError, match="used as often"):
        joiner(2).prove(challenge(host, 2, joiner(2)))


def test_invitation_ends_after_its_last_use_and_not_before() -> None:
    host = inviter(uses=2)
    ceremony(host, joiner(1), 1)
    assert (host.state, host.uses_left) == (j.InviteState.OPEN, 1)
    ceremony(host, joiner(2), 2)
    assert host.state is j.InviteState.USED_UP


def test_machine_that_comes_back_takes_no_second_use() -> None:
    host = inviter(uses=1)
    ceremony(host, joiner(1), 1)
    ceremony(host, joiner(1), 2)
    assert host.uses_left == 0


def test_machine_that_was_a_member_like_this_takes_no_use() -> None:
    host = inviter(uses=1)
    assert not ceremony(host, joiner(1), 1, new=False).new
    assert (host.state, host.uses_left) == (j.InviteState.OPEN, 1)
    assert ceremony(host, joiner(2), 2).new
    ceremony(host, joiner(2), 3, new=False)  # its connection broke: the same machine, still one
    assert (host.state, host.uses_left) == (j.InviteState.USED_UP, 0)


def test_three_wrong_secrets_burn_the_invitation_for_the_right_one_too() -> None:
    host = inviter()
    for attempt in (1, 2, 3):
        wrong = joiner(secret=b"x" * 16)
        proof = wrong.prove(challenge(host, attempt, wrong))
        effects = host.handle(0.0, j.ProofReceived(attempt, proof))
        assert refusal(effects) == "wrong-proof"
        assert j.WrongTry(3 - attempt) in effects
        host.check()
    assert effects[-1] == j.Ended(j.InviteState.BURNED)
    assert refusal(host.handle(0.0, j.HelloReceived(9, joiner().hello(), bytes(32)))) == "burned"


def test_sixteen_guesses_at_once_are_evaluated_three_times() -> None:
    host = inviter()
    guesses = [joiner(n, secret=n.to_bytes(16, "big")) for n in range(1, 17)]
    proofs = [g.prove(challenge(host, n, g)) for n, g in enumerate(guesses)]
    answers = [refusal(host.handle(0.0, j.ProofReceived(n, p))) for n, p in enumerate(proofs)]
    assert answers == ["wrong-proof"] * 3 + ["burned"] * 13
    assert refusal(host.handle(0.0, j.HelloReceived(99, joiner().hello(), bytes(32)))) == "burned"


def test_relay_with_another_certificate_on_its_second_leg_fails_and_costs_one_try() -> None:
    host = inviter()
    victim = joiner(channel=OTHER_CHANNEL)  # sees the relay's certificate
    proof = victim.prove(challenge(host, 1, victim))
    assert refusal(host.handle(0.0, j.ProofReceived(1, proof))) == "wrong-proof"
    assert host.tries_left == 2
    assert host.uses_left == 1


def test_relay_that_swaps_the_joiners_key_fails() -> None:
    host = inviter()
    victim, relay = joiner(1), joiner(2, secret=b"?" * 16)
    proof = victim.prove(challenge(host, 1, relay))
    assert refusal(host.handle(0.0, j.ProofReceived(1, proof))) == "wrong-proof"


def test_right_secret_with_somebody_elses_key_fails() -> None:
    """The signature, not only the secret, is needed: keys cannot be claimed."""
    host, honest = inviter(), joiner(1)
    proof = wire.unpack(honest.prove(challenge(host, 1, honest)))
    forged = wire.pack({**proof, "signature": bytes(64)})
    assert refusal(host.handle(0.0, j.ProofReceived(1, forged))) == "wrong-proof"


def test_proof_of_one_attempt_is_worthless_in_the_next() -> None:
    host, who = inviter(uses=2), joiner()
    proof = who.prove(challenge(host, 1, who))
    challenge(host, 2, who)
    assert refusal(host.handle(0.0, j.ProofReceived(2, proof))) == "wrong-proof"


def test_inviter_without_the_secret_is_refused_by_the_joiner() -> None:
    impostor = j.Inviter(mesh=MESH, secret=b"x" * 16, channel=CHANNEL, uses=1, now=0.0)
    who = joiner()
    who.prove(challenge(impostor, 1, who))
    answer = wire.pack({"confirmation": bytes(32), "sealed": bytes(64)})
    with pytest.raises(JoinError, match="could not prove"):
        who.accept(answer)


def test_admission_into_another_mesh_than_the_line_names_is_refused() -> None:
    other = key(77)
    request = j.JoinRequest(id_of(key(1)), key(1).public_key().public_bytes_raw(), "box", ())
    good = admission(request)
    j.check_admission(good, MESH, request.node)
    with pytest.raises(JoinError, match="another mesh"):
        j.check_admission(admission(request, ca=other), MESH, request.node)
    with pytest.raises(JoinError, match="another machine's key"):
        j.check_admission(good, MESH, id_of(key(2)))


def test_expired_invitation_refuses_and_ends() -> None:
    host = inviter()
    late, early = joiner(1), joiner(2)
    proof = early.prove(challenge(host, 1, early))
    assert host.next_timeout() == j.INVITE_S
    assert refusal(host.handle(600.0, j.HelloReceived(2, late.hello(), bytes(32)))) == "expired"
    assert refusal(host.handle(600.0, j.ProofReceived(1, proof))) == "expired"
    assert host.handle(600.0, j.Tick()) == [j.Ended(j.InviteState.EXPIRED)]
    assert host.next_timeout() is None


def test_other_mesh_other_version_and_noise_cost_no_try() -> None:
    host = inviter()
    hello = wire.unpack(joiner().hello())
    other = wire.pack({**hello, "mesh": "cd" * 32})
    newer = wire.pack({"version": 2, "something": "else"})
    assert refusal(host.handle(0.0, j.HelloReceived(1, other, bytes(32)))) == "wrong-mesh"
    assert refusal(host.handle(0.0, j.HelloReceived(2, newer, bytes(32)))) == "version"
    for noise in (b"", b"GET / HTTP/1.1\r\n", wire.pack([1]), bytes(5000)):
        with pytest.raises(RemoteProtocolError):
            host.handle(0.0, j.HelloReceived(3, noise, bytes(32)))
        with pytest.raises(RemoteProtocolError):
            host.handle(0.0, j.ProofReceived(3, noise))
    assert host.tries_left == 3
    ceremony(host, joiner())


def test_failure_to_sign_gives_the_use_back() -> None:
    host, who = inviter(), joiner()
    proof = who.prove(challenge(host, 1, who))
    host.handle(0.0, j.ProofReceived(1, proof))
    assert host.uses_left == 0
    assert refusal(host.handle(0.0, j.AdmitFailed(1))) == "failed"
    assert host.uses_left == 1
    ceremony(host, who, 2)


def test_every_refusal_has_words_and_a_next_step() -> None:
    for why in j.Refusal:
        with pytest.raises(JoinError) as caught:
            joiner().prove(wire.pack({"refused": why}))
        assert caught.value.hint
    with pytest.raises(JoinError, match="without a reason"):
        joiner().prove(wire.pack({"refused": "\x1b[2Jhello"}))


def test_steps_out_of_order_are_our_bug() -> None:
    with pytest.raises(IllegalTransitionError):
        joiner().accept(b"")
    with pytest.raises(IllegalTransitionError):
        inviter().handle(0.0, j.Admitted(1, admission(j.JoinRequest("", FOUNDER, "x", ()))))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hello", "prove", "forge", "lost", "fail", "tick", "noise"]),
        st.integers(1, 4),
        st.floats(0, 250),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_breaks_the_invitation(
    steps: list[tuple[str, int, float]], uses: int
) -> None:
    host, now = inviter(uses), 0.0
    challenges: dict[int, bytes] = {}
    admitted: set[str] = set()
    wrong = 0
    for what, who, passed in steps:
        now += passed if what == "tick" else 0.0
        effects: list[j.Effect] = []
        try:
            match what:
                case "hello":
                    nonce = len(challenges).to_bytes(32, "big")
                    hello = joiner(who).hello()
                    effects = host.handle(now, j.HelloReceived(who, hello, nonce))
                    challenges[who] = effects[0].data  # type: ignore[union-attr]
                case "prove" | "forge" | "fail" if who in challenges:
                    secret = b"x" * 16 if what == "forge" else SECRET
                    proof = joiner(who, secret=secret).prove(challenges[who])
                    effects = host.handle(now, j.ProofReceived(who, proof))
                    wrong += any(isinstance(e, j.WrongTry) for e in effects)
                    if isinstance(effects[0], j.Admit):
                        assert what != "forge"
                        if what == "fail":
                            host.handle(now, j.AdmitFailed(who))
                        else:
                            host.handle(now, j.Admitted(who, admission(effects[0].request)))
                            admitted.add(effects[0].request.node)
                case "lost":
                    host.handle(now, j.ConnectionLost(who))
                case "noise":
                    host.handle(now, j.ProofReceived(who, b"\xc1"))
                case "tick":
                    host.handle(now, j.Tick())
        except (RemoteProtocolError, JoinError):
            pass
        host.check()
        assert len(admitted) <= uses
        assert wrong <= j.TRIES
