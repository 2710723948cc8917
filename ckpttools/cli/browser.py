"""The screen of `ckpt browse`. It draws only visible rows, and reads in a thread that can be stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from ckpttools.cli.browse import BrowserPage, Cells, Lines, Session, Task
from ckpttools.cli.error_boundary import error_lines
from ckpttools.cli.output import has_color, styled, with_flags, wrap
from ckpttools.cli.signals import Stopped
from ckpttools.core.errors import CheckpointError, CheckpointWarning
from ckpttools.core.process_exit import end_process
from ckpttools.core.text import format_disk, printable, printable_text, unmark_styles
from ckpttools.stores.registry import parse

# Narrower screens show either the list or the text next to it.
_WIDE = 100
# Time for a task to stop when the browser ends. Reads of a server that does not answer take longer.
_STOP_SECONDS = 0.5
_REFRESH_SECONDS = 0.1
_STYLES = {
    "bold": Style(bold=True),
    "warning": Style(color="yellow"),
    "error": Style(color="red"),
    "dim": Style(dim=True),
}
_CURSOR, _BLURRED_CURSOR, _NO_STYLE = Style(reverse=True), Style(bold=True, underline=True), Style()

KEYS = (
    ("↑ ↓ PgUp PgDn Home End", "move; so do j, k and the mouse wheel"),
    ("Enter, click again", "open a row: a step, a group, or an array with its statistics and values"),
    ("→ ←", "open a group; close it, or go to the row above it"),
    ("u", "list folded layers or experts one by one, or fold them again"),
    ("l", "show the layers of an array side by side; in a comparison, rank layers or arrays"),
    ("v", "read a region of an array, such as 3, 10:20"),
    ("/", "show only arrays that contain all words in name, dtype, shape or role"),
    ("s", "sort the tree by size, or layers by norm, std or max abs"),
    ("i", "describe the checkpoint: kind, family, parameters, warnings"),
    ("Space", "mark a step"),
    ("d", "compare two marked steps, or with another checkpoint; ranks the differences"),
    ("y", "copy the name"),
    ("c", "choose a name, a path or a command to copy"),
    ("Tab", "move between the list and the text next to it"),
    ("Esc", "stop reading, close the text, or go back"),
    ("?", "show this help"),
    ("q", "quit"),
)


def run(session: Session, first: Task, title: str) -> None:
    """Run the browser until the user quits.

    Args:
        session: Limits.
        first: Task that opens the first page.
        title: Name of the location.

    Raises:
        CheckpointError: The first page could not be opened.
        Stopped: A signal ended the process.
    """
    if has_color() is False:
        os.environ.setdefault("NO_COLOR", "1")
    app = Browser(session, first, title)
    with warnings.catch_warnings():
        warnings.showwarning = app.show_warning
        app.run()
    if not app.reader.stop():
        # The terminal is restored, and nothing was written: there is no reason to wait for a server.
        end_process(0 if app.signal is None else 128 + app.signal)
    if app.signal is not None:
        raise Stopped(app.signal)
    if app.error is not None:
        raise app.error


class _JobStoppedError(Exception):
    """The user has stopped a task."""


class Job:
    """A task in the thread.

    Attributes:
        task: The task.
        title: Name for the status line.
        done, total: Bytes read so far, and all.
        lines: Latest text to show.
        result: The page that it returned, or the exception that ended it.
        is_done: Whether it has ended.
        is_stopped: Whether the user has stopped it.
        adds_page: Whether the page is shown on top of the current one instead of replacing it.
    """

    def __init__(self, task: Task, title: str, post: Callable[[Message], object], adds_page: bool) -> None:
        self.task, self.title, self.adds_page = task, title, adds_page
        self.done = self.total = 0
        self.lines: Lines | None = None
        self.result: BrowserPage | BaseException | None = None
        self.is_done = self.is_stopped = False
        self._post = post

    def show(self, lines: Lines) -> None:
        self._check()
        self.lines = lines
        self._post(Updated(self))

    def observe(self, done: int, total: int) -> None:
        self._check()
        self.done, self.total = done, total

    def _check(self) -> None:
        if self.is_stopped:
            raise _JobStoppedError

    def run(self, session: Session) -> None:
        """Run the task in this thread."""
        try:
            self._check()
            with session.limits():
                self.result = self.task(self)
        except _JobStoppedError:
            self.is_stopped = True
        except Exception as error:  # A defect in a page or a plug-in must not end the browser.
            self.result = error
        self.is_done = True
        self._post(Updated(self))


class Updated(Message):
    """A job has text to show, or has ended."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class ReadingThread:
    """A thread that runs one job at a time, so that all of them together keep to the memory limit."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._changed = threading.Condition()
        self._next: Job | None = None
        self.job: Job | None = None
        self._ends = False
        self._context = copy_context()
        self._thread = threading.Thread(target=self._context.run, args=(self._run,), daemon=True)

    def start(self, job: Job) -> None:
        """Stop the running job, then run this one."""
        with self._changed:
            self.cancel()
            self._next = job
            self._changed.notify()
        if not self._thread.is_alive():
            self._thread.start()

    def cancel(self) -> bool:
        """Stop the running or waiting job at its next piece; return whether there was one."""
        jobs = [job for job in (self.job, self._next) if job is not None and not job.is_stopped]
        for job in jobs:
            job.is_stopped = True
        self._next = None
        return bool(jobs)

    @property
    def is_busy(self) -> bool:
        """Return whether a job runs or waits."""
        return self._next is not None or self.job is not None

    def stop(self) -> bool:
        """End the thread; return whether it has ended in time."""
        with self._changed:
            self.cancel()
            self._ends = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self.job = None
                self._changed.wait_for(lambda: self._next is not None or self._ends)
                if self._ends:
                    return
                self.job, self._next = self._next, None
            assert self.job is not None
            self.job.run(self._session)


def _to_text(line: str) -> Text:
    """Convert a line of command output, in which names are escaped, to text for the screen."""
    return Text.from_ansi(unmark_styles(printable_text(with_flags(line))))


class RowList(ScrollView, can_focus=True):
    """A list of rows with a cursor. Only visible rows are drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "jump(0)", show=False),
        Binding("end,G", "jump(-1)", show=False),
    ]

    class Chosen(Message):
        """The cursor has moved, or the row is opened."""

        def __init__(self, sender: RowList, is_opened: bool) -> None:
            super().__init__()
            self.sender, self.is_opened = sender, is_opened

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rows: Sequence[Any] = ()
        self.cursor = 0
        self._cells: Callable[[Any, int], Cells] = lambda row, width: Cells("")

    @property
    def row(self) -> Any:
        """The row at the cursor; None if there are no rows."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def set_rows(self, rows: Sequence[Any], cells: Callable[[Any, int], Cells], cursor: int) -> None:
        self.rows, self._cells = rows, cells
        self.virtual_size = Size(0, len(rows))
        self.move_to(cursor)
        self.refresh()

    def move_to(self, cursor: int, *, is_opened: bool = False) -> None:
        self.cursor = max(0, min(cursor, len(self.rows) - 1))
        height = max(self.size.height, 1)
        if self.cursor < self.scroll_offset.y:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)
        elif self.cursor >= self.scroll_offset.y + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Chosen(self, is_opened))

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(self.size.height - 1, 1))

    def action_jump(self, to: int) -> None:
        self.move_to(to if to >= 0 else len(self.rows) - 1)

    def on_resize(self) -> None:
        self.move_to(self.cursor)

    def on_click(self, event: events.Click) -> None:
        number = self.scroll_offset.y + event.y
        if number < len(self.rows):
            self.move_to(number, is_opened=number == self.cursor)

    def render_line(self, y: int) -> Strip:
        number, width = self.scroll_offset.y + y, self.scrollable_content_region.width
        if number >= len(self.rows):
            return Strip.blank(width)
        cells = self._cells(self.rows[number], width)
        style = _STYLES.get(cells.style, _NO_STYLE)
        if number == self.cursor:
            style += _CURSOR if self.has_focus else _BLURRED_CURSOR
        return Strip([Segment(fit_cells(cells, width), style)], width)

    def watch_has_focus(self, _has_focus: bool) -> None:
        super().watch_has_focus(_has_focus)
        self.refresh()


def fit_cells(cells: Cells, width: int) -> str:
    """Return the text of a row in exactly this number of columns."""
    right = printable(cells.right)
    room = max(width - cell_len(right), 0)
    left = printable(cells.left)
    if cell_len(left) > room:
        left = set_cell_size(left, max(room - 1, 0)) + "…" * (room > 0)
    return set_cell_size(set_cell_size(left, room) + right, width)


class TextPane(ScrollView, can_focus=True):
    """Text that is wrapped for the width of the pane."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lines: Lines = lambda width: ()
        self._texts: Sequence[Text] = ()
        self._drawn: object = None

    def set_lines(self, lines: Lines, *, keeps_place: bool = False) -> None:
        self._lines, self._drawn = lines, None
        if not keeps_place:
            self.scroll_to(y=0, animate=False, immediate=True)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.scrollable_content_region.width
        if width < 1 or self._drawn == width:
            return
        self._drawn = width
        try:
            lines = list(self._lines(max(width, 10)))
        except Exception as error:  # For example, values that numpy cannot format.
            lines = error_lines(error, width)
        texts = [_to_text(line) for line in lines]
        self._texts = [part for text in texts for part in (text.wrap(self.app.console, width) or [text])]
        self.virtual_size = Size(0, len(self._texts))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number, width = self.scroll_offset.y + y, self.scrollable_content_region.width
        if number >= len(self._texts):
            return Strip.blank(width)
        segments = self._texts[number].render(self.app.console)
        return Strip(segments).adjust_cell_length(width)


class ChoiceScreen(ModalScreen[str | None]):
    """A list of texts to copy."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", "Close"),
        Binding("enter", "choose", "Copy"),
    ]

    def __init__(self, choices: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._choices = choices

    def compose(self) -> ComposeResult:
        yield Static("Copy", classes="heading")
        yield RowList(id="choices")
        yield Footer()

    def on_mount(self) -> None:
        width = max(len(label) for label, _ in self._choices)
        self.query_one(RowList).set_rows(
            self._choices, lambda row, _: Cells(f"{row[0]:<{width}}  {row[1]}"), 0
        )

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        event.stop()
        if event.is_opened:
            self.action_choose()

    def action_choose(self) -> None:
        self.dismiss(self.query_one(RowList).row[1])


class HelpScreen(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "dismiss(None)", "Close")
    ]

    def compose(self) -> ComposeResult:
        yield Static("Keys", classes="heading")
        pane = TextPane(id="keys")
        pane.set_lines(_help_lines)
        yield pane
        yield Footer()


def _help_lines(width: int) -> list[str]:
    column = max(len(keys) for keys, _ in KEYS) + 2
    lines = []
    for keys, text in KEYS:
        if width < 2 * column:
            lines += [styled(keys, bold=True), *(f"  {line}" for line in wrap(text, width - 2))]
            continue
        first, *more = wrap(text, width - column)
        lines += [styled(f"{keys:<{column}}", bold=True) + first, *(" " * column + line for line in more)]
    return lines


class Browser(App[None]):
    """The browser: a stack of pages on the left, and text about the row at the cursor on the right.

    Attributes:
        reader: The thread that reads.
        signal: The signal that ended the browser; None if the user quit.
        error: The reason why the first page could not be opened.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #title { height: 1; text-style: bold; }
    #head, #status { height: 1; color: $text-muted; text-style: dim; }
    #body { height: 1fr; }
    #list { width: 3fr; height: 1fr; scrollbar-size-vertical: 1; }
    #text { width: 2fr; height: 1fr; border-left: vkey $primary; padding: 0 0 0 1; }
    RowList, TextPane { scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    #prompt { display: none; height: 1; border: none; padding: 0; }
    .narrow #text { display: none; }
    .narrow.reading #text { display: block; width: 1fr; border-left: none; padding: 0; }
    .narrow.reading #list { display: none; }
    ChoiceScreen, HelpScreen { align: center middle; }
    .heading { text-style: bold; height: 1; }
    #choices, #keys { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("right", "open_group", show=False),
        Binding("left", "close_group", show=False),
        Binding("slash", "ask('filter')", "Filter", key_display="/"),
        Binding("l", "layers", "Layers"),
        Binding("v", "ask('index')", "Values"),
        Binding("d", "compare", "Diff"),
        Binding("c", "copy_menu", "Copy"),
        Binding("y", "copy_name", show=False),
        Binding("u", "list_siblings", show=False),
        Binding("s", "sort", show=False),
        Binding("i", "about", show=False),
        Binding("space", "mark", show=False),
        Binding("tab", "switch", show=False, priority=True),
        Binding("escape", "go_back", "Back"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, session: Session, first: Task, title: str) -> None:
        super().__init__()
        self.theme = "ansi-dark"
        self.reader = ReadingThread(session)
        self.signal: int | None = None
        self.error: BaseException | None = None
        self._first = first
        self._pages: list[tuple[BrowserPage, int]] = []
        self._question = ""
        self._early_keys: list[events.Key] = []
        self._row: Any = None

        # Timers and messages may come before and after the widgets are on the screen.
        self._heading = Static(printable(title), id="title", markup=False)
        self._head = Static("", id="head", markup=False)
        self._list, self._text = RowList(id="list"), TextPane(id="text")
        self._body = Horizontal(self._list, self._text, id="body")
        self._prompt = Input(id="prompt", compact=True)
        self._status = Static("Opening …", id="status", markup=False)

    def compose(self) -> ComposeResult:
        yield from (self._heading, self._head, self._body, self._prompt, self._status)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._set_width(self.size.width)
        self._list.focus()
        self.set_interval(_REFRESH_SECONDS, self._show_progress)
        self._start(self._first, str(self._heading.content), adds_page=True)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, self._stop_on_signal, number)
            except (RuntimeError, ValueError):  # Not in the main thread.
                return

    def _stop_on_signal(self, number: int) -> None:
        self.signal = number
        self.exit()

    def on_resize(self, event: events.Resize) -> None:
        self._set_width(event.size.width)

    def _set_width(self, width: int) -> None:
        self._body.set_class(width < _WIDE, "narrow")

    def show_warning(self, message: Warning | str, *_: object, **__: object) -> None:
        """Show a warning of the library. Called in the thread that reads."""
        text = message.args[0] if isinstance(message, CheckpointWarning) else message
        self.post_message(Warned(printable(with_flags(str(text)))))

    def on_warned(self, event: Warned) -> None:
        self.notify(event.text, severity="warning", markup=False)

    # Jobs

    def _start(self, task: Task, title: str, *, adds_page: bool = True) -> None:
        self.reader.start(Job(task, title, self.post_message, adds_page))
        self._show_progress()

    def on_updated(self, event: Updated) -> None:
        job = event.job
        if job.is_stopped:
            self._show_progress()
            return
        if isinstance(job.result, BrowserPage):
            if job.adds_page:
                self._push(job.result)
            else:
                self._draw_page()
        elif isinstance(job.result, BaseException) and not self._pages:
            self.exit()
            self.error = job.result
        elif isinstance(job.result, BaseException):
            self._show_text(partial(error_lines, job.result))
        elif job.lines is not None:
            self._show_text(job.lines, keeps_place=job.is_done)
        self._show_progress()

    def _show_progress(self) -> None:
        job = self.reader.job
        text = "" if self._page is None else self._page.note
        if job is not None and not job.is_done:
            text = f"Reading {printable(job.title)}"
            if job.is_stopped:
                text = "Stopping …"
            elif job.total and job.done >= job.total:
                # A comparison searches for causes, which reads some arrays again.
                text = f"Computing {printable(job.title)} …  Esc stops"
            elif job.total:
                text = f"Reading {format_disk(job.done)} of {format_disk(job.total)} …  Esc stops"
        if self._status.content != text:
            self._status.update(text)

    # Pages

    def _push(self, page: BrowserPage) -> None:
        if self._pages:
            self._pages[-1] = (self._pages[-1][0], self._list.cursor)
        self._pages.append((page, 0))
        self._set_reading(False)
        self._row = None
        self._draw_page(0)
        self._list.focus()
        self._show_text(page.facts(None), is_opened=False)
        while self._early_keys:
            self._list.post_message(self._early_keys.pop(0))

    def _draw_page(self, cursor: int | None = None) -> None:
        page = self._pages[-1][0]
        self._heading.update(printable(page.title))
        self._draw_head()
        self._list.set_rows(page.rows, page.cells, self._list.cursor if cursor is None else cursor)

    def _draw_head(self) -> None:
        width = self._list.scrollable_content_region.width or self.size.width
        self._head.update(fit_cells(self._pages[-1][0].head(width), width))

    @property
    def _page(self) -> BrowserPage | None:
        return self._pages[-1][0] if self._pages else None

    def _show_text(self, lines: Lines, *, is_opened: bool = True, keeps_place: bool = False) -> None:
        if is_opened and self._body.has_class("narrow") and not self._body.has_class("reading"):
            self._set_reading(True)
            self._text.focus()
        self._text.set_lines(lines, keeps_place=keeps_place)

    def _set_reading(self, is_reading: bool) -> None:
        """Show the text instead of the list, if there is no room for both."""
        self._body.set_class(is_reading, "reading")
        self._head.display = not is_reading

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        page, row = self._page, event.sender.row
        if page is None or event.sender.id != "list":
            return
        # A list posts this message after a resize, too.
        self._draw_head()
        if event.is_opened:
            self.action_open()
        elif row is not None and row is not self._row:
            if self._row is not None:
                self._show_text(page.facts(row), is_opened=False)
            self._row = row

    # Keys

    def _do(self, call: Callable[[BrowserPage, Any], Task | None], *, adds_page: bool = True) -> None:
        """Call the page with the row at the cursor, start the task that it returns, or draw it again."""
        page, row = self._page, self._list.row
        if page is None or row is None:
            return
        with self._notify_errors():
            task = call(page, row)
            if task is None:
                self._draw_page()
            else:
                self._start(task, getattr(row, "name", "") or page.title, adds_page=adds_page)

    @contextmanager
    def _notify_errors(self) -> Iterator[None]:
        """Show errors of the `with` block as notifications."""
        try:
            yield
        except CheckpointError as error:
            self.notify(printable(with_flags(error.raw.message)), severity="warning", markup=False)

    def _move(self, call: Callable[[BrowserPage, Any], int | None]) -> None:
        """Call the page with the row at the cursor, and move to the row that it returns."""
        page, row = self._page, self._list.row
        if page is not None and row is not None:
            cursor = call(page, row)
            if cursor is not None:
                self._draw_page(cursor)

    def action_open(self) -> None:
        if self.focused is not self._text:
            self._do(lambda page, row: page.open(row))

    def action_open_group(self) -> None:
        row = self._list.row
        line = getattr(row, "line", None)
        if line is not None and not line.is_leaf and not row.is_open:
            self._do(lambda page, row: page.open(row))

    def action_close_group(self) -> None:
        self._move(lambda page, row: page.close(row))

    def action_list_siblings(self) -> None:
        self._move(lambda page, row: page.list_siblings(row))

    def action_layers(self) -> None:
        self._do(lambda page, row: page.layers(row))

    def action_sort(self) -> None:
        self._do(lambda page, row: page.sort(), adds_page=False)

    def action_about(self) -> None:
        task = None if self._page is None else self._page.about()
        if task is not None and self._page is not None:
            self._start(task, self._page.title)

    def action_mark(self) -> None:
        self._do(lambda page, row: page.mark(row))

    def action_compare(self) -> None:
        page, row = self._page, self._list.row
        if page is None or row is None:
            return
        with self._notify_errors():
            task = page.compare(row, None)
            if task is None:
                self.action_ask("compare")
            else:
                self._start(task, "both checkpoints")

    def action_copy_name(self) -> None:
        page, row = self._page, self._list.row
        if page is not None and row is not None:
            self._copy(page.copies(row)[0][1])

    def action_copy_menu(self) -> None:
        page, row = self._page, self._list.row
        if page is not None and row is not None:
            self.push_screen(ChoiceScreen(page.copies(row)), self._copy)

    def _copy(self, text: str | None) -> None:
        if text is not None:
            self.copy_to_clipboard(text)
            self.notify(printable(text), title="Copied", markup=False)

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_switch(self) -> None:
        if self.focused is self._list and self._text.display:
            self._text.focus()
        elif self.focused is self._text and self._list.display:
            self._list.focus()

    def action_go_back(self) -> None:
        if self._prompt.display:
            self._close_prompt()
            if self._question == "filter":
                self._filter("")
        elif self.reader.cancel():
            self._show_progress()
        elif self._body.has_class("reading"):
            self._set_reading(False)
            self._list.focus()
        elif len(self._pages) > 1:
            self._pages.pop()
            gc.collect()  # The process collects rarely, and a checkpoint may have 100,000 arrays.
            self._row = None
            self._draw_page(self._pages[-1][1])
            self._list.focus()

    # Questions

    _PROMPTS: ClassVar = {
        "filter": "words in the name, dtype, shape or role",
        "index": "region to read, such as 3, 10:20",
        "compare": "path of the other checkpoint",
    }

    def action_ask(self, question: str) -> None:
        if self._page is None:
            return
        self._question = question
        self._prompt.placeholder = self._PROMPTS[question]
        with self._prompt.prevent(Input.Changed):
            self._prompt.value = ""
        # `Widget.focus` waits for the next message: keys that are typed until then would be commands.
        self._prompt.display = True
        self.screen.set_focus(self._prompt)

    def on_key(self, event: events.Key) -> None:
        """Pass keys to the prompt that were typed before it had the focus or before the first page was shown.

        They come from the widget that had the focus then; the prompt itself consumes printable keys.
        """
        key = events.Key(event.key, event.character)
        if self._page is None and (event.key == "slash" or self._early_keys):
            # There is nothing to filter yet.
            self._early_keys.append(key)
        elif self.focused is self._prompt and event.is_printable:
            self._prompt.post_message(key)
        else:
            return
        event.stop()
        event.prevent_default()

    def _close_prompt(self) -> None:
        self._prompt.display = False
        self.screen.set_focus(self._list)

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._question == "filter":
            self._filter(event.value)

    def _filter(self, words: str) -> None:
        task = None if self._page is None else self._page.filter(words)
        if task is not None:
            self._start(task, "names", adds_page=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_prompt()
        value = event.value.strip()
        if self._question == "index" and value:
            self._do(lambda page, row: page.index(row, value))
        elif self._question == "compare" and value:
            self._do(lambda page, row: page.compare(row, parse(value)))


class Warned(Message):
    """The library issued a warning."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
