"""The names of the scopes that the library puts around operations of a program."""

import re

KERNEL = "gainstage.half_only"  # of a `cond` that holds a kernel in two precisions
SELF_SCALED = "gainstage.self_scaled"  # of operations that scale a loss, or a part, by no state
MULTIPLIED = "gainstage.multiplied"  # of products of the cotangents of a part and its factor
DIVIDED = "gainstage.divided"  # of the quotients of its gradients and that factor
KEEP_FLOAT32 = "keep_float32"  # of operations that stay in float32
# A whole name in a path of scopes, also inside of the names of transformations: "a/jvp(b)/c".
KEEPS = re.compile(rf"(^|[/(]){KEEP_FLOAT32}([/)]|$)")
