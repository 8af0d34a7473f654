"""Who else is asked and told: plugins, loaded only when there is one.

Looking for installed plugins reads the entry points of ``sys.path`` as text
(2 ms); pluggy and ``importlib.metadata`` (40 ms) are imported only when that
finds one, or when the program passes plugins of its own. A plugin that cannot
be loaded refuses every protected write: a veto that is silently absent would
be worse than an error.

Here and below, locks and thread-locals are taken from ``_thread``, of which
``threading`` is made: that would be half a millisecond of each command.
"""

from __future__ import annotations

import errno
import os
import sys
import weakref
from _thread import RLock, _local

from agent_checkpoint import forks, payload
from agent_checkpoint.errors import FenceRefusedError, InvalidInputError, ReentrancyError, StorageError
from agent_checkpoint.names import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    import pluggy

    from agent_checkpoint.records import Event, Write

GROUP = "agent_checkpoint"
RESTRICT = "AGENT_CHECKPOINT_PLUGINS"
# What keeps a folder or a file of ``sys.path`` from being read by anybody: there is no plugin in it.
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class _Inside(_local):
    """The hook that this thread is running."""

    hook: str | None = None


_inside = _Inside()


def refuse_inside_hook() -> None:
    """Raise ``ReentrancyError`` when this thread is running a hook."""
    hook = _inside.hook
    if hook is not None:
        raise ReentrancyError(
            f"the plugin hook {hook} called the store: a hook sees one record and decides by it",
            hint="note the event and use the store from your own thread",
            hook=hook,
        )


def installed() -> dict[str, set[str]]:
    """The plugins that the environment allows, each with the distributions that offer it."""
    allowed = os.environ.get(RESTRICT)
    if allowed is not None and allowed.strip().lower() == "off":
        return {}
    found: dict[str, set[str]] = {}
    for folder in sys.path:
        for distribution, name in _offered_in(folder or os.curdir):
            found.setdefault(name, set()).add(distribution)
    if allowed:
        wanted = {part.strip() for part in allowed.split(",")}
        found = {name: offers for name, offers in found.items() if name in wanted}
    return found


def _offered_in(folder: str) -> Iterator[tuple[str, str]]:
    try:
        entries = os.listdir(folder)
    except OSError as error:
        _refuse_to_guess(folder, error)
        return
    for entry in entries:
        if entry.endswith((".dist-info", ".egg-info")):
            try:
                with open(os.path.join(folder, entry, "entry_points.txt"), encoding="utf-8") as source:
                    text = source.read()
            except OSError as error:
                _refuse_to_guess(folder, error)
                continue
            except UnicodeDecodeError:
                continue
            for name in _names(text):
                yield entry.partition("-")[0], name


def _refuse_to_guess(folder: str, error: OSError) -> None:
    """Raise ``StorageError`` for what says nothing of whether there is a plugin, as too many open files."""
    if error.errno not in NOTHING_THERE:
        raise StorageError(
            f"{folder}: cannot be looked at for plugins, which may have a veto: {error.strerror}; nothing was written",
            hint="try again when the process can open files (ulimit -n)",
        ) from error


def _names(entry_points: str) -> list[str]:
    if f"[{GROUP}]" not in entry_points:
        return []
    names, inside = [], False
    for line in map(str.strip, entry_points.splitlines()):
        if line.startswith("["):
            inside = line == f"[{GROUP}]"
        elif inside and "=" in line and line[0] not in "#;":
            names.append(line.partition("=")[0].strip())
    return names


class Plugins:
    """The plugins of one store; empty and cheap when there are none."""

    def __init__(self, given: Sequence[object] = ()) -> None:
        # One thread may come again, in the handler of a signal.
        self._lock = RLock()
        _all.add(self)
        self._loaded = False
        self._manager: pluggy.PluginManager | None = None
        self._broken: dict[str, str] = {}
        self._checks: list[tuple[str, Callable[..., Any]]] = []
        self._listeners: list[tuple[str, Callable[..., Any]]] = []
        for plugin in given:
            self._register_given(plugin)

    def check_fence(self, write: Write) -> FenceRefusedError | None:
        """The first veto against a protected write, or None."""
        if not self._loaded:
            self._load()
        for plugin, why in self._broken.items():
            return _veto(plugin, FenceRefusedError(f"the plugin cannot be loaded: {why}"))
        for plugin, check in self._checks:
            try:
                self._call("check_fence", check, write=write)
            except FenceRefusedError as refused:
                return _veto(plugin, refused)
            except (Exception, SystemExit) as error:
                return _veto(plugin, FenceRefusedError(f"{type(error).__name__}: {error}"))
        return None

    def listening(self) -> bool:
        """Whether anybody wants to hear events. Asked before a lock is taken: it may load plugins."""
        if not self._loaded:
            self._load()
        return bool(self._listeners)

    def tell(self, events: Sequence[Event]) -> None:
        """Tell every listener each event, once; called with no lock held."""
        for event in events:
            for plugin, listener in self._listeners:
                try:
                    self._call("event_recorded", listener, event=event)
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as error:  # asyncio's CancelledError and SystemExit are the plugin's own
                    _log_failure(plugin, event, error)

    def report(self) -> list[dict[str, Any]]:
        """Every plugin with the hooks it implements, or why it cannot be loaded."""
        if not self._loaded:
            self._load()
        hooks: dict[str, list[str]] = {}
        for hook, callers in (("check_fence", self._checks), ("event_recorded", self._listeners)):
            for name, _ in callers:
                hooks.setdefault(name, []).append(hook)
        broken = [{"plugin": name, "error": why} for name, why in self._broken.items()]
        return [*broken, *({"plugin": name, "hooks": hooks[name]} for name in sorted(hooks))]

    def _call(self, hook: str, caller: Callable[..., Any], **record: object) -> None:
        _inside.hook = hook
        try:
            caller(**record)
        finally:
            _inside.hook = None

    def _load(self) -> None:
        with self._lock:
            if not self._loaded:
                for name, offers in installed().items():
                    self._register_installed(name, offers)
                if self._manager is not None:
                    self._checks = _callers(self._manager, "check_fence")
                    self._listeners = _callers(self._manager, "event_recorded")
                self._loaded = True

    def _managed(self) -> pluggy.PluginManager:
        if self._manager is None:
            import pluggy

            from agent_checkpoint import hookspecs

            self._manager = pluggy.PluginManager(hookspecs.PROJECT)
            self._manager.add_hookspecs(hookspecs)
        return self._manager

    def _register_given(self, plugin: object) -> None:
        """A plugin that the program passed: its mistakes are the program's.

        Raises:
            InvalidInputError: it is no plugin, or implements a hook that there is not.
        """
        manager = self._managed()
        name = getattr(plugin, "__name__", None) or type(plugin).__qualname__
        taken = sum(known.partition("#")[0] == name for known, _ in manager.list_name_plugin())
        try:
            _register(manager, plugin, f"{name}#{taken + 1}" if taken else name)
        except Exception as error:
            invalid("plugins", f"{name}: {error}")

    def _register_installed(self, name: str, offers: set[str]) -> None:
        """A plugin that is installed: where it is broken, that is on record, and it refuses."""
        from importlib.metadata import entry_points

        manager = self._managed()
        if len(offers) > 1:
            self._broken[name] = f"several distributions offer it: {', '.join(sorted(offers))}"
            return
        # A plugin that uses a store while it is imported would wait for itself.
        _inside.hook = "import"
        try:
            all_found = entry_points(group=GROUP, name=name)
            if not all_found:
                raise LookupError("its entry point was there, and cannot be found any more")
            for found in all_found:
                _register(manager, found.load(), name)
        except (Exception, SystemExit) as error:
            self._broken[name] = f"{type(error).__name__}: {error}"
            if manager.has_plugin(name):
                manager.unregister(name=name)
        finally:
            _inside.hook = None


_all: weakref.WeakSet[Plugins] = weakref.WeakSet()


def _unlock() -> None:
    """In a forked child: who was loading is not here."""
    for plugins in list(_all):
        plugins._lock = RLock()


forks.at_fork(in_child=_unlock)


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Register a plugin once; the program may have passed one that is installed as well."""
    if not manager.is_registered(plugin):
        manager.register(plugin, name)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise TypeError("implements no hook: mark check_fence or event_recorded with @hookimpl")


def _callers(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Callable[..., Any]]]:
    """A caller for each plugin alone, in call order, so that one's failure is its own."""
    names = [each.plugin_name for each in reversed(getattr(manager.hook, hook).get_hookimpls())]
    everyone = [plugin for _, plugin in manager.list_name_plugin() if plugin is not None]
    return [
        (name, manager.subset_hook_caller(hook, [other for other in everyone if manager.get_name(other) != name]))
        for name in dict.fromkeys(names)
    ]


def _veto(plugin: str, refused: FenceRefusedError) -> FenceRefusedError:
    """The error to raise: the hook's own hint and facts, and who refused."""
    reason = str(refused) or getattr(refused, "reason", "no reason given")
    hint = refused.hint or "this is a rule of the people who installed the plugin; ask them, or try when it allows"
    # What the hook said goes on record, where it can be written down.
    facts = {name: value if _is_json(value) else repr(value) for name, value in refused.facts.items()}
    facts |= {"plugin": plugin, "reason": reason}
    return FenceRefusedError(f"plugin {plugin!r} refused the write: {reason}", hint=hint, **facts)


def _is_json(value: object) -> bool:
    try:
        payload.encode("fact", value)
    except InvalidInputError:
        return False
    return True


def _log_failure(plugin: str, event: Event, error: BaseException) -> None:
    import logging

    log = logging.getLogger("agent_checkpoint.plugins")
    # The trace only for those who look for it: without a handler it would land on stderr.
    trace = log.isEnabledFor(logging.DEBUG)
    log.error(
        "plugin %s failed on %s (event %s), which is recorded all the same: %s: %s",
        *(plugin, event.kind, event.id, type(error).__name__, error),
        exc_info=error if trace else None,
    )
