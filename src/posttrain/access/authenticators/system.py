"""The user of this process, as the operating system knows it: nothing needs to be shown."""

import os
import pwd

from posttrain.access.ports import OS, Identity
from posttrain.domain.errors import AccessError


class SystemUser:
    """Whoever runs this process."""

    auth = OS

    def authenticate(self, proof: str = "") -> Identity:
        """See `Authenticator.authenticate`; anything that is shown is refused, since nothing could be said of it."""
        if proof:
            raise AccessError("this workspace knows its user by the operating system; log in nowhere, show nothing")
        return Identity(f"user:{login_name()}", self.auth)


def login_name() -> str:
    """The name of the process's user, and not what LOGNAME says: anybody may set that."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())
