"""Files for other runtimes, compared with PyTorch before anything is called done."""

from pmvit.runtime.export.run import Exported, export

__all__ = ["Exported", "export"]
