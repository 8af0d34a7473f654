"""Who else is asked and told: plugins, loaded only when there is one.

Looking for installed plugins reads the entry points of ``sys.path`` as text
(2 ms); pluggy and ``importlib.metadata`` (40 ms) are imported only when that
finds one, or when the program passes plugins of its own. A plugin that cannot
be loaded refuses every protected write: a veto that is silently absent would
be worse than an error.
"""

from __future__ import annotations

import os
import sys
import threading

from agent_checkpoint.errors import FenceRefusedError, ReentrancyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import pluggy

    from agent_checkpoint.records import Event, Write

GROUP = "agent_checkpoint"
RESTRICT = "AGENT_CHECKPOINT_PLUGINS"


class _Inside(threading.local):
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


def installed() -> list[str]:
    """Names of the plugins that installed distributions offer and the environment allows."""
    allowed = os.environ.get(RESTRICT)
    if allowed is not None and allowed.strip().lower() == "off":
        return []
    names = sorted({name for folder in sys.path for name in _offered_in(folder or os.curdir)})
    if allowed:
        wanted = {part.strip() for part in allowed.split(",")}
        names = [name for name in names if name in wanted]
    return names


def _offered_in(folder: str) -> list[str]:
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    names: list[str] = []
    for entry in entries:
        if entry.endswith((".dist-info", ".egg-info")):
            try:
                with open(os.path.join(folder, entry, "entry_points.txt"), encoding="utf-8") as source:
                    names += _names(source.read())
            except (OSError, UnicodeDecodeError):
                continue
    return names


def _names(entry_points: str) -> list[str]:
    if f"[{GROUP}]" not in entry_points:
        return []
    names, inside = [], False
    for line in map(str.strip, entry_points.splitlines()):
        if line.startswith("["):
            inside = line == f"[{GROUP}]"
        elif inside and "=" in line:
            names.append(line.partition("=")[0].strip())
    return names


class Plugins:
    """The plugins of one store; empty and cheap when there are none."""

    def __init__(self, given: Sequence[object] = ()) -> None:
        self._given = tuple(given)
        self._lock = threading.Lock()
        self._loaded = False
        self._broken: dict[str, str] = {}
        self._checks: list[tuple[str, Callable[..., Any]]] = []
        self._listeners: list[tuple[str, Callable[..., Any]]] = []

    def check_fence(self, write: Write) -> FenceRefusedError | None:
        """The first veto against a protected write, or None."""
        if not self._loaded:
            self._load()
        for plugin, why in self._broken.items():
            return _veto(plugin, f"the plugin cannot be loaded: {why}")
        for plugin, check in self._checks:
            try:
                self._call("check_fence", check, write=write)
            except FenceRefusedError as refused:
                return _veto(plugin, str(refused) or getattr(refused, "reason", "no reason given"))
            except Exception as error:
                return _veto(plugin, f"{type(error).__name__}: {error}")
        return None

    def listening(self) -> bool:
        """Whether anybody wants to hear events."""
        if not self._loaded:
            self._load()
        return bool(self._listeners)

    def tell(self, events: Sequence[Event]) -> None:
        """Tell every listener each event, once; called with no lock held."""
        for event in events:
            for plugin, listener in self._listeners:
                try:
                    self._call("event_recorded", listener, event=event)
                except Exception:
                    import logging

                    logging.getLogger("agent_checkpoint.plugins").exception(
                        "plugin %s failed on %s (event %s); the event itself is recorded", plugin, event.kind, event.id
                    )

    def report(self) -> list[dict[str, Any]]:
        """Every plugin with the hooks it implements, or why it cannot be loaded."""
        self._load()
        names = sorted({name for name, _ in (*self._checks, *self._listeners)})
        found: list[dict[str, Any]] = [{"plugin": name, "error": why} for name, why in self._broken.items()]
        for name in names:
            hooks = [
                hook
                for hook, callers in (("check_fence", self._checks), ("event_recorded", self._listeners))
                if name in dict(callers)
            ]
            found.append({"plugin": name, "hooks": hooks})
        return found

    def _call(self, hook: str, caller: Callable[..., Any], **record: object) -> None:
        _inside.hook = hook
        try:
            caller(**record)
        finally:
            _inside.hook = None

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if not self._loaded:
                names = installed()
                if names or self._given:
                    self._register(names)
                self._loaded = True

    def _register(self, names: list[str]) -> None:
        import pluggy

        from agent_checkpoint import hookspecs

        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        for name in names:
            try:
                manager.load_setuptools_entrypoints(GROUP, name=name)
            except Exception as error:
                self._broken[name] = f"{type(error).__name__}: {error}"
            else:
                if manager.get_plugin(name) is None:
                    self._broken[name] = "its entry point is listed but cannot be found"
        for plugin in self._given:
            manager.register(plugin)
        manager.check_pending()
        self._checks = _callers(manager, "check_fence")
        self._listeners = _callers(manager, "event_recorded")


def _callers(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Callable[..., Any]]]:
    """A caller for each plugin alone, in call order, so that one's failure is its own."""
    names = [each.plugin_name for each in reversed(getattr(manager.hook, hook).get_hookimpls())]
    everyone = [plugin for _, plugin in manager.list_name_plugin() if plugin is not None]
    return [
        (name, manager.subset_hook_caller(hook, [other for other in everyone if manager.get_name(other) != name]))
        for name in dict.fromkeys(names)
    ]


def _veto(plugin: str, reason: str) -> FenceRefusedError:
    return FenceRefusedError(
        f"plugin {plugin!r} refused the write: {reason}",
        hint="this is a rule of the people who installed the plugin; ask them, or try when it allows",
        plugin=plugin,
        reason=reason,
    )
