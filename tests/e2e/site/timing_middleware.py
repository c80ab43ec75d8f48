"""Middlewares before and after ecd's: the log has how long each request was with it."""

import sys
import time


class Before:
    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            scope["ecd_began_s"] = time.perf_counter()
        await self._app(scope, receive, send)


class After(Before):
    async def __call__(self, scope, receive, send):
        if "ecd_began_s" in scope:
            took_s = time.perf_counter() - scope["ecd_began_s"]
            print(f"{scope['path']} was with the middleware for {took_s:.7f} s", file=sys.stderr)
        await self._app(scope, receive, send)
