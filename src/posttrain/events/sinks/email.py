"""Events as e-mails, by SMTP. The Message-ID is the event's id, so a mailbox can drop duplicates."""

import re
import smtplib
import socket
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any, ClassVar

from posttrain.domain.errors import InputError
from posttrain.domain.sinks import Notice
from posttrain.events.ports import (
    ANSWER_SECONDS,
    WHOLE_SECONDS,
    Admit,
    NetworkSink,
    Patience,
    anywhere,
    one_line,
    reach,
    refuse_variable,
    secret,
)

STARTTLS, NONE = "starttls", "none"
_ADDRESS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,253}")
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,253}")


class _Session(smtplib.SMTP):
    """An SMTP session with a time limit, to admitted addresses only."""

    def __init__(self, host: str, port: int, where: str, admit: Admit, patience: Patience) -> None:
        self._where, self._admit, self._patience = where, admit, patience
        super().__init__(host, port, local_hostname=socket.gethostname(), timeout=ANSWER_SECONDS)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:  # as smtplib's own SMTP_SSL does
        return reach(host, port, self._where, self._admit, self._patience)


class EmailSink(NetworkSink):
    """The `Sink` of one address.

    Args:
        settings: `to`, `from`, `host`, `port`, `security` (starttls or none), and the names of variables that contain
            user and password: `user_env`, `password_env`.
    """

    kind: ClassVar[str] = "email"
    fields = frozenset({"to", "from", "host", "port", "security", "user_env", "password_env"})

    def __init__(self, settings: Mapping[str, Any], admit: Admit = anywhere, patience: float = WHOLE_SECONDS) -> None:
        super().__init__(settings, admit, patience)
        self._to, self._from = (_address(settings, name) for name in ("to", "from"))
        self._host, self._port = str(settings.get("host") or ""), settings.get("port")
        if not _HOST.fullmatch(self._host) or not isinstance(self._port, int) or not 0 < self._port < 65536:
            raise InputError(f"email: --smtp must be HOST:PORT, got {self._host!a}:{self._port!a}")
        self._security = str(settings.get("security") or STARTTLS)
        if self._security not in (STARTTLS, NONE):
            raise InputError(f"email: --smtp-security must be {STARTTLS} or {NONE}, got {self._security!a}")
        self._user, self._password = settings.get("user_env"), settings.get("password_env")
        if bool(self._user) != bool(self._password):
            raise InputError(
                "email: --smtp-user-env and --smtp-password-env must be set together, got only one of them"
            )
        refuse_variable(self._user, "email: --smtp-user-env")
        refuse_variable(self._password, "email: --smtp-password-env")
        if self._user and self._security == NONE:
            raise InputError(f"email: a password needs --smtp-security {STARTTLS}, got {NONE}: others could read it")

    @property
    def where(self) -> str:
        """See `Sink.where`."""
        return f"{self._to} by {self._host}:{self._port}"

    def _hand_over(self, notice: Notice, patience: Patience) -> None:
        assert isinstance(self._port, int)
        with closing(_Session(self._host, self._port, self.where, self._admit, patience)) as session:
            if self._security == STARTTLS:
                session.starttls(context=ssl.create_default_context())
            if self._user:
                user, password = (secret(name, None, self.where) for name in (self._user, self._password))
                session.login(user, password)
            session.send_message(_message(notice, self._from, self._to))
            with suppress(smtplib.SMTPException, OSError):  # the message was accepted: errors of QUIT do not matter
                session.quit()

    def _refusal(self, error: Exception) -> str:
        """Return the code of an SMTP server's refusal, without its text, which could repeat the request."""
        if isinstance(error, smtplib.SMTPAuthenticationError):
            return f"the server rejects the user name and password ({error.smtp_code})"
        if isinstance(error, smtplib.SMTPRecipientsRefused):
            return f"the server refuses the address ({', '.join(str(code) for code, _ in error.recipients.values())})"
        if isinstance(error, smtplib.SMTPNotSupportedError):
            return "the server does not support the requested method (STARTTLS or a password)"
        if isinstance(error, smtplib.SMTPResponseException):
            return f"the server answers {error.smtp_code}"
        return f"the server failed ({type(error).__name__})" if isinstance(error, smtplib.SMTPException) else ""


def _message(notice: Notice, sender: str, to: str) -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = sender, to, one_line(notice.subject)
    message["Date"] = formatdate(notice.at)
    message["Message-ID"] = f"<{notice.id}@posttrain>"
    message["Auto-Submitted"] = "auto-generated"
    message["X-Posttrain-Event"], message["X-Posttrain-Sequence"] = notice.id, str(notice.sequence)
    lines = [one_line(line, 1000) for line in notice.lines]
    message.set_content("\n".join([*lines, "", f"event {notice.id}, number {notice.sequence} of its log", ""]))
    return message


def _address(settings: Mapping[str, Any], name: str) -> str:
    found = str(settings.get(name) or "")
    if not _ADDRESS.fullmatch(found):
        raise InputError(f"email: --{'email' if name == 'to' else name} must be one address NAME@HOST, got {found!a}")
    return found
