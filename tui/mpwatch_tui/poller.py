"""The thread that looks: a few times a second, sooner when a command waits, slower past the end."""

import threading
import time
from collections.abc import Callable
from typing import Final

from mpwatch_tui.picture import Picture
from mpwatch_tui.watching import Watching

LOOK_EVERY_S: Final = 0.25
LOOK_EVERY_WHEN_OVER_S: Final = 1.0
# Between looks while the log catches up: the thread that draws needs the interpreter too.
BREATH_S: Final = 0.03


class Poller(threading.Thread):
    """Looks through `watching` and hands each picture to `deliver`, until `stop`."""

    def __init__(
        self,
        watching: Watching,
        deliver: Callable[[Picture], object],
        failed: Callable[[Exception], object],
    ) -> None:
        super().__init__(name="mpwatch-looks", daemon=True)
        self._watching, self._deliver, self._failed = watching, deliver, failed
        self._wake = threading.Event()
        self._ending = False

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """End after the look that is under way; does not wait for it."""
        self._ending = True
        self._wake.set()

    def run(self) -> None:
        """Look until stopped. What goes wrong is shown, and tried again."""
        try:
            while not self._ending:
                began = time.monotonic()
                every = LOOK_EVERY_S
                try:
                    picture = self._watching.look(time.time())
                    if picture.connection == "over":
                        every = LOOK_EVERY_WHEN_OVER_S
                    if self._watching.behind:
                        every = 0.0
                    if not self._ending:
                        self._deliver(picture)
                except Exception as error:  # A screen that stays with its last picture is better.
                    every = LOOK_EVERY_WHEN_OVER_S
                    if not self._ending:
                        self._failed(error)
                self._wake.wait(max(BREATH_S, every - (time.monotonic() - began)))
                self._wake.clear()
        finally:
            self._watching.close()
