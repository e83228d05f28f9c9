"""Where finished wheels lie: the folder `dist`, and the package index that is made of it."""

from torchwheels.index import kept, site
from torchwheels.index.kept import KEPT, kept_if_refused, publish
from torchwheels.index.site import make_site

__all__ = ["KEPT", "kept", "kept_if_refused", "make_site", "publish", "site"]
