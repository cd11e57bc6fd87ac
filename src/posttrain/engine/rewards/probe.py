"""`python -m posttrain.engine.rewards.probe`: whether this machine confines rewards, as one JSON object.

`{"whole": true, "notes": []}`: a worker is started and confined as every reward's is, and runs nobody's code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from posttrain.engine.rewards.layout import Provision, lay_out
from posttrain.engine.rewards.session import EndedError, LateError, Session


def main() -> int:
    """Print what came of a cell."""
    with tempfile.TemporaryDirectory(prefix="posttrain-reward-") as scratch:
        source = Path(scratch, "reward.py")
        source.touch()
        place = Path(scratch, "cell")
        place.mkdir()
        try:
            session = Session(lay_out(place, source, source.name, whole=False, hidden=(), provision=Provision({})))
        except (EndedError, LateError) as error:
            print(
                json.dumps({"whole": False, "notes": [f"its worker {error}" if str(error) else "its worker is late"]})
            )
            return 0
        session.close()
        print(json.dumps({"whole": session.confined, "notes": session.notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
