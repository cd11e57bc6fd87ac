"""`python -m posttrain.engine.rewards.probe`: whether this machine confines rewards, as one JSON object.

`{"whole": true, "notes": []}`: a worker is started and confined as every reward's is, and runs nobody's code. Exit code
1 where it did not come so far, which says nothing of the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from posttrain.engine.rewards.layout import Provision, lay_out
from posttrain.engine.rewards.session import EndedError, NotConfinedError, Session


def main() -> int:
    """Print what came of a cell."""
    with tempfile.TemporaryDirectory(prefix="posttrain-reward-") as scratch:
        source = Path(scratch, "reward.py")
        source.touch()
        place = Path(scratch, "cell")
        place.mkdir()
        try:
            session = Session(lay_out(place, source, source.name, whole=False, hidden=(), provision=Provision({})))
        except (NotConfinedError, EndedError) as error:
            print(error, file=sys.stderr)
            return 1
        session.close()
        print(json.dumps({"whole": session.confined, "notes": session.notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
