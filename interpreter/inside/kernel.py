"""The Python kernel: ipykernel, with what results are shown as beside IPython's own."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

# The directory of this file is no place for user code to import from.
HERE = sys.path.pop(0)

from ipykernel.kernelapp import IPKernelApp  # noqa: E402
from IPython.core.formatters import BaseFormatter  # noqa: E402
from traitlets import ObjectName, Unicode  # noqa: E402
from traitlets.config import Config  # noqa: E402

MOST_CELLS = 200_000


class Formatter(BaseFormatter):
    """Shows one type of a module that may never be imported. It is asked for on each look: matplotlib's
    own set-up drops what is registered for figures."""

    print_method = ObjectName("_repr_e2b_")
    _return_type = dict
    where = ("", "")

    def lookup(self, obj: Any) -> Any:
        module, name = self.where
        kind = getattr(sys.modules.get(module), name, None)
        if kind is None or not isinstance(obj, kind):
            return super().lookup(obj)
        return self.shown


class ChartFormatter(Formatter):
    format_type = Unicode("e2b/chart")
    where = ("matplotlib.figure", "Figure")
    shown = staticmethod(lambda figure: chart(figure))


class DataFormatter(Formatter):
    format_type = Unicode("e2b/data")
    where = ("pandas", "DataFrame")
    shown = staticmethod(lambda frame: data(frame))


def chart(figure: Any) -> Any:
    """None where there is nothing to tell, or the figure is one that nobody thought of: it is still a picture."""
    sys.path.insert(0, HERE)
    try:
        from charts import chart_of
    finally:
        sys.path.remove(HERE)
    try:
        return chart_of(figure)
    except Exception:
        return None


def data(frame: Any) -> Any:
    """The columns of a data frame, by name."""
    if frame.size > MOST_CELLS:
        return None

    def cell(value: Any) -> Any:
        if value is None or isinstance(value, (str, bool, int)):
            return value
        if isinstance(value, float):
            return value if value == value and abs(value) != float("inf") else None
        if hasattr(value, "isoformat"):
            text = value.isoformat()
            return None if text == "NaT" else text
        item = getattr(value, "item", None)
        return cell(item()) if item is not None and not hasattr(value, "__len__") else str(value)

    return {str(name): [cell(v) for v in frame.iloc[:, i].tolist()] for i, name in enumerate(frame.columns)}


def show_images() -> None:
    """Image.show() of Pillow is a result here: there is no screen. One saved by a name is too, as with E2B."""
    try:
        from PIL import Image, ImageShow
    except ImportError:
        return
    from IPython.display import display

    class Result(ImageShow.Viewer):
        def show(self, image: Any, **options: Any) -> int:
            display(image)
            return 1

    ImageShow.register(Result(), order=0)
    save = Image.Image.save

    def saved(image: Any, fp: Any, format: Any = None, **params: Any) -> None:
        save(image, fp, format, **params)
        if isinstance(fp, str):
            display(image)

    Image.Image.save = saved


class KernelApp(IPKernelApp):
    def init_iopub(self, context: Any) -> None:
        # A publisher drops what is over 1000 messages, the end of an execution with it.
        context.sndhwm = 0
        super().init_iopub(context)

    def init_shell(self) -> None:
        super().init_shell()
        formatter = self.shell.display_formatter
        for f in (ChartFormatter(parent=formatter), DataFormatter(parent=formatter)):
            formatter.formatters[f.format_type] = f
            formatter.active_types = [*formatter.active_types, f.format_type]
        self.shell.events.register("pre_run_cell", self.reseed)
        show_images()

    def reseed(self, *_: object) -> None:
        """Once, before the first cell: sandboxes of one template would all draw the same numbers."""
        self.shell.events.unregister("pre_run_cell", self.reseed)
        random.seed(os.urandom(32))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))


if __name__ == "__main__":
    config = Config()
    config.InteractiveShell.colors = "nocolor"
    config.PlainTextFormatter.max_seq_length = 0
    config.HistoryManager.enabled = False  # a thread and a database less
    KernelApp.launch_instance(config=config)
