"""Encrypted connections between ranks: the same results, and who is refused with what words."""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Given, World, Worlds

import gradwire as gw
from gradwire.transport import tls, wire
from gradwire.transport.keys import JobKey
from gradwire.transport.tls import EncryptedSocket


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def authority(folder: Path, name: str, days: int = 30) -> Path:
    """A certificate that signs others; its key has the suffix `.key`."""
    made = folder / f"{name}.pem"
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", made.with_suffix(".key"))
    openssl("req", "-x509", *key, "-out", made, "-subj", f"/CN={name}", "-days", str(days))
    return made


def certificate(signer: Path, name: str, days: int = 30) -> Path:
    """A rank's certificate; its key has the suffix `.key`."""
    made, request = signer.with_name(f"{name}.pem"), signer.with_name(f"{name}.csr")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", made.with_suffix(".key"))
    openssl("req", *key, "-out", request, "-subj", f"/CN={name}")
    signed = ("-CA", signer, "-CAkey", signer.with_suffix(".key"), "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signed, "-out", made, "-days", str(days))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """What to pass as `tls`, by what is special about it."""
    folder = tmp_path_factory.mktemp("certificates")
    first, second = authority(folder, "first"), authority(folder, "second")
    of: dict[str, tuple[Path, Path]] = {
        "rank 0": (certificate(first, "rank0"), first),
        "rank 1": (certificate(first, "rank1"), first),
        "of another authority": (certificate(second, "other"), second),
        "expired": (certificate(first, "old", days=-1), first),
        "not signed by it": (certificate(second, "foreign"), first),
    }
    return {what: (str(own), str(own.with_suffix(".key")), str(ca)) for what, (own, ca) in of.items()}


def trained(option: Any, shapes: list[int], **options: Any) -> tuple[list[torch.Tensor], int, int]:
    """Gradients of two steps; how many wires have a connection that is encrypted, and how many are there."""
    model = Given(shapes)
    handle = gw.parallelize(model, plan=gw.Identity(), tls=option, **options)
    grads = []
    for step in range(2):
        model.zero_grad()
        model(model.random_gradients(dist.get_rank(), step)).backward()
        grads += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    wires = [lane.link.wire for lane in handle.session.lanes.data]
    encrypted = sum(isinstance(each, EncryptedSocket) for wire in wires if wire is not None for each in wire._sockets.values())
    handle.detach()
    return grads, encrypted, len(wires)


SHAPES = [1, 7, 123, 4097, 2**20 + 1]


def compared(options: list[Any], memory: str) -> str:
    """How the gradients of encrypted connections differ from those of others."""
    os.environ["GRADWIRE_SHARED_MEMORY"] = memory
    option = options[dist.get_rank() % len(options)]
    plain, none, _ = trained(False, SHAPES)
    encrypted, count, wires = trained(option, SHAPES)
    os.environ.pop("GRADWIRE_SHARED_MEMORY")
    others = dist.get_world_size() - 1
    if none or count != wires * others:
        return f"{none} and {count} connections of {wires} wires to {others} ranks are encrypted"
    return "" if all(map(torch.equal, plain, encrypted)) and len(plain) == 2 * len(SHAPES) else "gradients differ"


@pytest.mark.parametrize("memory", ["off", "on"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_plain_connections(worlds: Worlds, ranks: int, memory: str) -> None:
    assert worlds.run(ranks, compared, [True], memory) == [""] * ranks


def test_certificates_of_ranks(worlds: Worlds, files: dict[str, tuple[str, str, str]]) -> None:
    assert worlds.run(2, compared, [files["rank 0"], files["rank 1"]], "off") == ["", ""]


def refused(options: list[Any]) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(gw.GradwireError) as caught:
        trained(options[dist.get_rank()], [7])
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


def all_are_refused(options: list[Any], *words: str) -> None:
    """All ranks raise an error with these words, long before the group's timeout."""
    with World(len(options), group_timeout_s=60.0) as world:
        for _, said, took_s in world.run(refused, options):
            assert all(each in said for each in words), said
            assert took_s < 20.0


def test_one_rank_without_encryption_is_told_by_all() -> None:
    all_are_refused([True, False, True], "rank 1 has no encryption", "rank 0 has encryption by the job's key", "the same tls=")


def test_an_expired_certificate_is_told_by_all(files: dict[str, tuple[str, str, str]]) -> None:
    options = [files["rank 0"], files["expired"], files["rank 1"]]
    all_are_refused(options, "rank 1 says", "old.pem cannot be used: certificate has expired", "Make a new certificate")


def test_a_certificate_that_the_authority_did_not_sign_is_told_by_all(files: dict[str, tuple[str, str, str]]) -> None:
    options = [files["rank 0"], files["not signed by it"]]
    all_are_refused(options, "rank 1 says", "foreign.pem cannot be used: unable to get local issuer", "Pass the CA file")


def test_two_authorities_are_told_by_all(files: dict[str, tuple[str, str, str]]) -> None:
    all_are_refused([files["rank 0"], files["of another authority"]], "ranks disagree on encryption", "the same CA file")


def test_a_missing_file_is_told_by_all(files: dict[str, tuple[str, str, str]]) -> None:
    own = files["rank 1"]
    all_are_refused(
        [files["rank 0"], (own[0], "/nowhere/rank1.key", own[2])], "rank 1 says", "'/nowhere/rank1.key' cannot be read"
    )


def test_files_in_another_order_are_told_by_all(files: dict[str, tuple[str, str, str]]) -> None:
    own, other = files["rank 0"], files["rank 1"]
    all_are_refused([own, (other[1], other[0], other[2])], "rank 1 says", "is not a certificate in PEM", "in this order")


def trusting_another(options: list[Any]) -> tuple[str, str, float]:
    """Rank 1 says that it has the same authorities as the others."""
    if dist.get_rank() == 1:
        make = tls.Tls.__init__

        def pretends(self: tls.Tls, *arguments: Any) -> None:
            make(self, *arguments)
            self.facts = facts

        honest = tls.tls_of(options[0], JobKey(bytes(32)))
        assert honest is not None
        facts = honest.facts
        tls.Tls.__init__ = pretends  # type: ignore[assignment,method-assign]
    return refused(options)


def test_who_shows_a_certificate_of_nobody_known_is_refused_by_name(files: dict[str, tuple[str, str, str]]) -> None:
    """Certificates are compared in the handshake too, not only by what ranks say."""
    with World(2, group_timeout_s=60.0) as world:
        zero, one = world.run(trusting_another, [files["rank 0"], files["of another authority"]])
    assert "with rank 1 cannot be encrypted" in zero[1]
    assert "with rank 0 cannot be encrypted" in one[1]
    assert "self-signed certificate in certificate chain. Pass the CA file" in one[1]
    assert max(zero[2], one[2]) < 20.0


def with_a_wrong_clock(options: list[Any]) -> tuple[str, str, float]:
    """Rank 1's clock is a hundred days ahead, when the certificate of rank 0 alone has expired."""
    if dist.get_rank() == 1:
        make = tls.Tls.__init__

        def ahead(self: tls.Tls, *arguments: Any) -> None:
            make(self, *arguments)
            library = tls.openssl()
            library.SSL_CTX_get0_param.argtypes, library.SSL_CTX_get0_param.restype = (ctypes.c_void_p,), ctypes.c_void_p
            library.X509_VERIFY_PARAM_set_time.argtypes = ctypes.c_void_p, ctypes.c_long
            hundred_days = 100 * 24 * 3600
            library.X509_VERIFY_PARAM_set_time(library.SSL_CTX_get0_param(self.context), int(time.time()) + hundred_days)

        tls.Tls.__init__ = ahead  # type: ignore[assignment,method-assign]
    return refused(options)


def test_a_third_rank_hears_what_another_found(tmp_path: Path) -> None:
    """Ranks 1 and 2 can connect, and so can ranks 0 and 2: rank 2 only finds that the others are gone."""
    signer = authority(tmp_path, "long", days=3000)
    made = [certificate(signer, f"of{rank}", days) for rank, days in enumerate((30, 3000, 3000))]
    options = [(str(each), str(each.with_suffix(".key")), str(signer)) for each in made]
    with World(3, group_timeout_s=60.0) as world:
        _, one, two = world.run(with_a_wrong_clock, options)
    assert "with rank 0 cannot be encrypted: certificate has expired" in one[1]
    assert "rank 1 says: the connection with rank 0 cannot be encrypted: certificate has expired" in two[1]
    assert "correct this machine's clock" in two[1]
    assert two[2] < 20.0


def with_somebody_between(who: int) -> tuple[str, float]:
    """The ends of the connections of rank `who` do not share the bytes that only two ends share."""
    began = time.monotonic()
    if dist.get_rank() == who:
        tls.EncryptedSocket.exported = lambda self: bytes(32)  # type: ignore[method-assign]
    with pytest.raises(gw.CommunicationError) as caught:
        trained(True, [7])
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_is_in_between_is_found(who: int) -> None:
    """Somebody passes the first proofs on, and has one encrypted connection with each rank."""
    with World(2, group_timeout_s=60.0) as world:
        said = world.run(with_somebody_between, who)
    assert any("somebody who does not know the job's key is in between" in words for words, _ in said)
    assert all(took_s < 20.0 for _, took_s in said)


def with_new_keys() -> str:
    """Every connection gets new keys all the time."""
    tls._RENEW_BYTES, tls.EncryptedSocket.renewed = 10_000, 0  # type: ignore[attr-defined]
    wire._RUNS_OF_A_KEY = 1
    renew = tls.EncryptedSocket.renew_key

    def counted(self: EncryptedSocket) -> None:
        before = self._renewed_at
        renew(self)
        tls.EncryptedSocket.renewed += self._renewed_at != before  # type: ignore[attr-defined]

    tls.EncryptedSocket.renew_key = counted  # type: ignore[method-assign]
    problem = compared([True], "off")
    return problem or ("" if tls.EncryptedSocket.renewed > 1 else "no key was renewed twice")  # type: ignore[attr-defined]


def test_keys_are_renewed_without_a_trace() -> None:
    with World(2) as world:
        assert world.run(with_new_keys) == ["", ""]


def by_environment(words: str, gloo: tuple[str, str, str] | None) -> str:
    os.environ["GRADWIRE_TLS"] = words
    if gloo is not None:
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
        os.environ.update(zip(tls._GLOO_FILES, gloo, strict=True))
    return compared([None], "off")


@pytest.mark.parametrize("how", ["on", "files", "gloo"])
def test_the_environment_says_so_too(files: dict[str, tuple[str, str, str]], how: str) -> None:
    own = files["rank 0"]
    words = {"on": "on", "files": ":".join(own), "gloo": ""}[how]
    with World(2) as world:
        assert world.run(by_environment, words, own if how == "gloo" else None) == ["", ""]


def exchanged() -> bool:
    tensor = torch.full((1000,), float(dist.get_rank()))
    exchange = gw.Exchange({"a": tensor}, gw.Identity(), tls=True)
    exchange.average_()
    encrypts = exchange.group.met.encrypts
    exchange.close()
    return encrypts and bool((tensor == 0.5).all())


def test_an_exchange_is_encrypted(worlds: Worlds) -> None:
    assert worlds.run(2, exchanged) == [True, True]


@pytest.mark.parametrize("option", ["on", ("a", "b"), 1.0, (1, 2, 3)])
def test_other_values_are_refused(option: Any) -> None:
    with pytest.raises(gw.PlanError, match="tls is"):
        tls.wanted_tls(option)
