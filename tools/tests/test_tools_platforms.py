"""tools.check_platforms: what it finds, and that the packages have none of it."""

from __future__ import annotations

import pytest

from tools import check_platforms
from tools.check_platforms import problems_in


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl\n",
        "from resource import getrusage\n",
        "import os\nme = os.getuid()\n",
        "import os\ndef f():\n    os.register_at_fork(before=f)\n",
        "import signal\nclass A:\n    def f(self):\n        return signal.SIGKILL\n",
    ],
)
def test_what_windows_lacks_is_found(source: str) -> None:
    assert len(list(problems_in(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f():\n    return os.geteuid() if hasattr(os, 'geteuid') else None\n",
        "def f():\n    import fcntl\n",
        "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None\n",
        "import os, sys\ndef f():\n    return 0 if sys.platform == 'win32' else os.getuid()\n",
    ],
)
def test_what_asks_first_is_not(source: str) -> None:
    assert list(problems_in(source)) == []


@pytest.mark.nightly("the session `lint` runs the same")
def test_nothing_in_the_packages_stands_in_the_way() -> None:
    assert check_platforms.main() == 0
