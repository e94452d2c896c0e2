"""Encrypts connections between ranks (TLS 1.3), with the OpenSSL library that Python's `ssl` has loaded.

`ssl` keeps its connections for itself, and C++ sends and receives on those of wires (csrc/phase.hpp). So gradwire calls the
library itself: Python connects (`EncryptedSocket.handshake`), then Python or C++ moves bytes. Two ranks believe each other either
by the job's key, or by certificates of the user's own.
"""

import ctypes
import errno
import hashlib
import os
import re
import selectors
import socket
import weakref
from collections.abc import Callable, Generator, Sequence
from ctypes import CFUNCTYPE, c_char_p, c_int, c_long, c_size_t, c_uint, c_uint64, c_ulong, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from gradwire.core import SWITCH_WORDS
from gradwire.errors import PlanError
from gradwire.transport.keys import JobKey

SWITCH = "GRADWIRE_TLS"
"""Where a script does not say: `on`, `off`, or three paths with a colon between them."""
TlsOption = bool | tuple[str | os.PathLike[str], str | os.PathLike[str], str | os.PathLike[str]] | None
"""Whether connections are encrypted: True by the job's key; or the paths of a certificate, its key and the authorities; None: as
the environment says."""
OFF = "no encryption"
_GLOO = "GLOO_DEVICE_TRANSPORT"
_GLOO_FILES = tuple(f"{_GLOO}_TCP_TLS_{what}" for what in ("CERT", "PKEY", "CA_FILE"))

_RECORD_BYTES = 2**14
"""The most bytes that TLS encrypts at once."""
_READ_BYTES = 2**16
"""So many bytes are taken from a socket at once."""
_RENEW_BYTES = 2**34
"""After so many bytes a connection gets a new key: AES-GCM is safe for about 2**38 bytes under one key."""
_PSK, _EXPORTED = b"gradwire", b"EXPORTER-gradwire"

# OpenSSL's constants
_TLS_1_3, _MIN_VERSION, _MODE, _READ_AHEAD = 0x0304, 123, 33, 41
_PARTIAL_WRITES, _MOVING_BUFFER, _RELEASE_BUFFERS = 1, 2, 0x10
_VERIFY = 1 | 2  # both sides show a certificate
_WANTS_READ, _WANTS_WRITE, _SYSTEM_CALL, _ENDED = 2, 3, 5, 6
_PEM = 1
_CIPHERS = b"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"

_CURES = {
    9: "Correct this machine's clock, or make a certificate that is valid now",
    10: "Make a new certificate, or correct this machine's clock",
    26: "A rank both calls and is called: make the certificate for serverAuth and clientAuth, or for no purpose in particular",
}
_OTHER_CURE = "Pass the CA file whose authority signed the certificates of all ranks"

_PASSWORD = CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_void_p)
_PSK_OF_CLIENT = CFUNCTYPE(c_uint, c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_uint)
_PSK_OF_SERVER = CFUNCTYPE(c_uint, c_void_p, c_char_p, c_void_p, c_uint)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # the result, and the arguments
    "TLS_method": (c_void_p,),
    "SSL_CTX_new": (c_void_p, c_void_p),
    "SSL_CTX_free": (None, c_void_p),
    "SSL_CTX_ctrl": (c_long, c_void_p, c_int, c_long, c_void_p),
    "SSL_CTX_set_num_tickets": (c_int, c_void_p, c_size_t),
    "SSL_CTX_set_default_read_buffer_len": (None, c_void_p, c_size_t),
    "SSL_CTX_set_ciphersuites": (c_int, c_void_p, c_char_p),
    "SSL_CTX_load_verify_locations": (c_int, c_void_p, c_char_p, c_char_p),
    "SSL_CTX_use_certificate_chain_file": (c_int, c_void_p, c_char_p),
    "SSL_CTX_use_PrivateKey_file": (c_int, c_void_p, c_char_p, c_int),
    "SSL_CTX_set_default_passwd_cb": (None, c_void_p, _PASSWORD),
    "SSL_CTX_set_psk_client_callback": (None, c_void_p, _PSK_OF_CLIENT),
    "SSL_CTX_set_psk_server_callback": (None, c_void_p, _PSK_OF_SERVER),
    "SSL_new": (c_void_p, c_void_p),
    "SSL_free": (None, c_void_p),
    "SSL_set_verify": (None, c_void_p, c_int, c_void_p),
    "SSL_set_fd": (c_int, c_void_p, c_int),
    "SSL_set_accept_state": (None, c_void_p),
    "SSL_set_connect_state": (None, c_void_p),
    "SSL_do_handshake": (c_int, c_void_p),
    "SSL_read_ex": (c_int, c_void_p, c_void_p, c_size_t, c_void_p),
    "SSL_write_ex": (c_int, c_void_p, c_void_p, c_size_t, c_void_p),
    "SSL_get_error": (c_int, c_void_p, c_int),
    "SSL_get_verify_result": (c_long, c_void_p),
    "SSL_export_keying_material": (c_int, c_void_p, c_void_p, c_size_t, c_char_p, c_size_t, c_char_p, c_size_t, c_int),
    "SSL_key_update": (c_int, c_void_p, c_int),
    "SSL_get_wbio": (c_void_p, c_void_p),
    "BIO_number_written": (c_uint64, c_void_p),
    "ERR_clear_error": (None,),
    "ERR_get_error": (c_ulong,),
    "ERR_reason_error_string": (c_char_p, c_ulong),
    "X509_verify_cert_error_string": (c_char_p, c_long),
}


class TlsError(ConnectionError):
    """A connection could not be encrypted."""


class _NotReady(BlockingIOError):
    """The connection can do nothing now."""

    def __init__(self, event: int) -> None:
        super().__init__(errno.EAGAIN, "the connection is not ready")
        self.event = event


class TlsSession(ctypes.Structure):
    """Twin of `TlsSession` in csrc/tls.hpp."""

    _fields_ = tuple((name, c_void_p) for name in ("ssl", "read", "write", "error", "clear_errors", "last_error", "words"))


def wanted_tls(option: TlsOption) -> TlsOption:
    """The option as it was passed. Raises PlanError for what is none."""
    paths = isinstance(option, tuple) and len(option) == 3 and all(isinstance(each, str | os.PathLike) for each in option)
    if option is None or isinstance(option, bool) or paths:
        return option
    raise PlanError(
        f"tls is {option!r}: it must be True, False, or the paths of three PEM files: (certificate, key, authorities). Leave it "
        f"out for what the variable {SWITCH} says."
    )


def tls_of(option: TlsOption, key: JobKey) -> "Tls | None":
    """Return the encryption of a meeting with this key; None for connections without encryption. Raises TlsError where a
    file or the library cannot be used."""
    option = _by_environment() if option is None else option
    if option is False:
        return None
    made = Tls(key, None if isinstance(option, bool) or option is None else tuple(map(Path, option)))
    made.try_out()
    return made


def _by_environment() -> TlsOption:
    words = os.environ.get(SWITCH, "")
    if not words and os.environ.get(_GLOO) == "TCP_TLS":  # what encrypts gloo encrypts gradwire too
        certificate, key, authorities = (os.environ.get(each, "") for each in _GLOO_FILES)
        return certificate, key, authorities
    if words in ("", *SWITCH_WORDS):
        return SWITCH_WORDS.get(words, False)
    paths = words.split(":")
    if len(paths) == 3:
        return paths[0], paths[1], paths[2]
    raise TlsError(f"{SWITCH} is {words!r}: it must be `on`, `off`, or CERTIFICATE:KEY:AUTHORITIES, the paths of three PEM files")


class Tls:
    """The common part of the encrypted connections of one meeting."""

    def __init__(self, key: JobKey, paths: tuple[Path, ...] | None) -> None:
        """`paths`: of a certificate, its key and the authorities; None: ranks believe each other by the key. Raises TlsError."""
        self._openssl, self._secret, self.paths = openssl(), key.proof(b"tls"), paths
        self.facts = OFF
        """The options that must be the same on all ranks, in words."""
        self.context = self._openssl.SSL_CTX_new(self._openssl.TLS_method())
        self._finalizer = weakref.finalize(self, _free_in, os.getpid(), self._openssl.SSL_CTX_free, self.context)
        self._finalizer.atexit = False
        for command, value in (
            (_MIN_VERSION, _TLS_1_3),
            (_MODE, _PARTIAL_WRITES | _MOVING_BUFFER | _RELEASE_BUFFERS),
            (_READ_AHEAD, 1),
        ):
            self._openssl.SSL_CTX_ctrl(self.context, command, value, None)
        self._openssl.SSL_CTX_set_num_tickets(self.context, 0)
        self._openssl.SSL_CTX_set_default_read_buffer_len(self.context, _READ_BYTES)
        self._openssl.SSL_CTX_set_ciphersuites(self.context, _CIPHERS)
        self._callbacks: tuple[Any, ...] = ()
        if paths is None:
            self._use_key()
        else:
            self._use_files(*paths)

    def _use_key(self) -> None:
        """The key proves who is who. What encrypts is agreed anew for each connection (ECDHE), so whoever reads the key and all
        packets reads no message."""
        self.facts = "encryption by the job's key"
        self._callbacks = _PSK_OF_CLIENT(self._of_client), _PSK_OF_SERVER(self._of_server)
        self._openssl.SSL_CTX_set_psk_client_callback(self.context, self._callbacks[0])
        self._openssl.SSL_CTX_set_psk_server_callback(self.context, self._callbacks[1])

    def _of_client(self, _ssl: Any, _hint: Any, name: int, _most: int, secret: int, _longest: int) -> int:
        ctypes.memmove(name, _PSK + b"\0", len(_PSK) + 1)
        ctypes.memmove(secret, self._secret, len(self._secret))
        return len(self._secret)

    def _of_server(self, _ssl: Any, _name: Any, secret: int, _longest: int) -> int:
        ctypes.memmove(secret, self._secret, len(self._secret))
        return len(self._secret)

    def _use_files(self, certificate: Path, key: Path, authorities: Path) -> None:
        for path in (certificate, key):
            _text_of(path)
        found = re.findall(r"-----BEGIN [A-Z ]*CERTIFICATE-----.+?-----END", _text_of(authorities), re.DOTALL)
        all_of_them = sorted("".join(each.split()) for each in found)
        self.facts = f"encryption by certificates of authorities {hashlib.sha256(''.join(all_of_them).encode()).hexdigest()[:16]}"
        self._callbacks = (_PASSWORD(lambda *_: -1),)  # nobody is asked for the password of a key
        self._openssl.SSL_CTX_set_default_passwd_cb(self.context, self._callbacks[0])
        library, context = self._openssl, self.context
        uses: tuple[tuple[Path, str, Callable[[bytes], int]], ...] = (
            (authorities, "authorities", lambda path: library.SSL_CTX_load_verify_locations(context, path, None)),
            (certificate, "a certificate", lambda path: library.SSL_CTX_use_certificate_chain_file(context, path)),
            (key, f"the key of {certificate}", lambda path: library.SSL_CTX_use_PrivateKey_file(context, path, _PEM)),
        )
        for path, what, use in uses:
            if use(os.fsencode(path)) != 1:
                raise TlsError(
                    f"{path} is not {what} in PEM, without a password ({self._last_words()}). Pass tls=(certificate, key, "
                    "authorities) in this order"
                )

    def socket(self, connection: socket.socket, calls: bool) -> "EncryptedSocket":
        """The connection, to be encrypted: `handshake` comes first. `calls`: whether this end called."""
        return EncryptedSocket(self, self._openssl, connection, calls)

    def try_out(self) -> None:
        """Connect with itself, so that a certificate that others would refuse is found before a rank begins. Raises TlsError."""
        ends = socket.socketpair()
        try:
            for end in ends:
                end.setblocking(False)
            steps = [self.socket(end, calls).handshake() for end, calls in zip(ends, (True, False), strict=True)]
            while steps:
                steps = [each for each in steps if next(each, None) is not None]
        except TlsError as error:
            what = "encryption" if self.paths is None else f"the certificate {self.paths[0]}"
            raise TlsError(f"{what} cannot be used: {error}") from error
        finally:
            for end in ends:
                end.close()

    def _last_words(self) -> str:
        words: bytes | None = self._openssl.ERR_reason_error_string(self._openssl.ERR_get_error())
        self._openssl.ERR_clear_error()
        return words.decode(errors="replace") if words else "no reason given"


class EncryptedSocket:
    """A connection that is encrypted. It has those methods of a socket that links use, and never blocks."""

    def __init__(self, tls: Tls, library: Any, connection: socket.socket, calls: bool) -> None:
        self._tls, self._openssl, self._connection = tls, library, connection
        self._ssl = library.SSL_new(tls.context)
        self._finalizer = weakref.finalize(self, _free_in, os.getpid(), library.SSL_free, self._ssl)
        self._finalizer.atexit = False  # a thread may still run on it
        library.SSL_set_fd(self._ssl, connection.fileno())
        # with a key nobody has a certificate, so that whoever does not know it is refused by both ends
        library.SSL_set_verify(self._ssl, _VERIFY if calls or tls.paths else 0, None)
        (library.SSL_set_connect_state if calls else library.SSL_set_accept_state)(self._ssl)
        names = "SSL_read_ex", "SSL_write_ex", "SSL_get_error", "ERR_clear_error", "ERR_get_error", "ERR_reason_error_string"
        self.session = TlsSession(self._ssl, *(ctypes.cast(getattr(library, name), c_void_p).value for name in names))
        """The functions with which C++ moves bytes."""
        self._renewed_at, self._is_within = 0, False

    def handshake(self) -> Generator[int, None, None]:
        """Agree with the other end. Yields the event that it waits for. Raises TlsError, ConnectionResetError."""
        while True:
            try:
                return self._done(self._openssl.SSL_do_handshake)
            except _NotReady as waits:
                yield waits.event

    def exported(self) -> bytes:
        """Bytes that both ends of this connection know, and nobody in between."""
        made = ctypes.create_string_buffer(32)
        self._openssl.SSL_export_keying_material(self._ssl, made, len(made), _EXPORTED, len(_EXPORTED), None, 0, 0)
        return made.raw

    def renew_key(self) -> None:
        """Encrypt with a new key from now on, if much was sent with this one. Nothing may be sent in part."""
        written = self._openssl.BIO_number_written(self._openssl.SSL_get_wbio(self._ssl))
        if written - self._renewed_at > _RENEW_BYTES and self._openssl.SSL_key_update(self._ssl, 0) == 1:
            self._renewed_at = written

    # ---- as of a socket

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, what: bytes) -> int:
        """Send bytes. Returns how many. Raises BlockingIOError, ConnectionError."""
        return self.sendmsg([memoryview(what)])

    def sendmsg(self, parts: Sequence[memoryview], _ancillary: Sequence[Any] = (), _flags: int = 0) -> int:
        """Send the first bytes of the parts. Returns how many. Raises BlockingIOError: the next call has the same parts."""
        record = bytearray()
        for part in parts:
            record += part[: _RECORD_BYTES - len(record)]
        if not self._is_within:
            self.renew_key()
        self._is_within = True
        sent = self._moved(self._openssl.SSL_write_ex, (ctypes.c_char * len(record)).from_buffer(record))
        self._is_within = False
        return sent

    def recv(self, count: int, flags: int = 0) -> bytes:
        """At most so many bytes. Raises BlockingIOError, ConnectionError."""
        came = bytearray(count)
        return bytes(came[: self.recv_into(memoryview(came), 0, flags)])

    def recv_into(self, into: memoryview, _count: int = 0, _flags: int = 0) -> int:
        """Receive bytes. Returns how many. Raises BlockingIOError, ConnectionError."""
        return self._moved(self._openssl.SSL_read_ex, (ctypes.c_char * len(into)).from_buffer(into))

    def shutdown(self, how: int) -> None:
        """End the connection, for any thread."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the connection. Nothing may run."""
        self._connection.close()
        self._finalizer()

    def _moved(self, call: Callable[..., int], place: Any) -> int:
        moved = c_size_t()
        self._done(call, place, len(place), ctypes.byref(moved))
        return moved.value

    def _done(self, call: Callable[..., int], *arguments: Any) -> None:
        """Call a function of OpenSSL. Raises _NotReady, TlsError, ConnectionResetError, OSError."""
        self._openssl.ERR_clear_error()
        ctypes.set_errno(0)
        result = call(self._ssl, *arguments)
        if result > 0:
            return
        number, error = ctypes.get_errno(), self._openssl.SSL_get_error(self._ssl, result)
        if error in (_WANTS_READ, _WANTS_WRITE):
            raise _NotReady(selectors.EVENT_READ if error == _WANTS_READ else selectors.EVENT_WRITE)
        if error == _SYSTEM_CALL and number:
            raise OSError(number, os.strerror(number))
        words = self._tls._last_words()
        if error in (_ENDED, _SYSTEM_CALL) or "unexpected eof" in words:
            raise ConnectionResetError("Connection closed by peer")
        if "verify failed" in words:
            code = self._openssl.SSL_get_verify_result(self._ssl)
            reason = self._openssl.X509_verify_cert_error_string(code).decode(errors="replace")
            raise TlsError(f"{reason}. {_CURES.get(code, _OTHER_CURE)}")
        raise TlsError(words)


Connected = socket.socket | EncryptedSocket
"""A connection to another rank."""


def _free_in(process: int, free: Callable[[Any], None], what: int) -> None:
    """Free an object of OpenSSL in the process that made it: in a forked one a thread may have been in the middle of it."""
    if os.getpid() == process:
        free(what)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise TlsError(f"{str(path)!r} cannot be read: {error.strerror}. tls= and {SWITCH} name three PEM files") from error


@cache
def openssl() -> Any:
    """The OpenSSL library: that of Python's `ssl`, else the system's. Raises TlsError."""
    problems = []
    for name in ("_ssl", "libssl.so.3", "libssl.so.1.1"):
        try:
            # a module that is part of the interpreter has no file; then the library's names are the process's own
            path = getattr(import_module(name), "__file__", None) if name == "_ssl" else name
            library = ctypes.CDLL(path, use_errno=True)
            for each, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(library, each)
                function.restype, function.argtypes = result, arguments
            return library
        except (ImportError, OSError, AttributeError) as error:
            problems.append(str(error))
    raise TlsError(f"no OpenSSL 1.1.1 or newer is installed ({'; '.join(problems)}). Install libssl (apt install libssl3)")
