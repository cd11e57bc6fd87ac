"""The user of this process according to the operating system: no proof is needed."""

import os
import pwd

from posttrain.access.ports import OS, Identity
from posttrain.domain.errors import AccessError


class SystemUser:
    """Identifies the user that runs this process."""

    auth = OS

    def authenticate(self, proof: str = "") -> Identity:
        """See `Authenticator.authenticate`; a proof is rejected, since it cannot be checked."""
        if proof:
            raise AccessError(
                "this workspace identifies its user by the operating system; it needs no login and no token"
            )
        return Identity(f"user:{login_name()}", self.auth)


def login_name() -> str:
    """Return the name of the process's user; LOGNAME is ignored, since any user may set it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())
