"""A middleware of an operator's, of the kind that wraps each request's stream."""


async def passes(request, call_next):
    return await call_next(request)
