"""The messages of the app, all of them: what the looking thread tells the drawing one."""

from textual.message import Message

from mpwatch_tui.picture import Picture


class Looked(Message):
    """There is a newer picture; of several that wait only the newest counts."""

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self.picture = picture

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Looked)


class LookFailed(Message):
    """A look ended in an error that nobody foresaw; the last picture stays."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, LookFailed)
