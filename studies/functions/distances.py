"""Distances, metric learning and contrastive losses."""

from . import function

TWO = "a 64 16, b 64 16"


def unit(xp, z):
    return z / xp.linalg.norm(z, axis=-1, keepdims=True)


@function("w 16 8", TWO)
def info_nce(xp, w, a, b):
    logits = unit(xp, a @ w) @ unit(xp, b @ w).T / 0.07
    return -xp.mean(xp.diagonal(xp.log_softmax(logits)))


@function("w 16 32, v 32 8, t =2.66", TWO)
def clip_loss(xp, w, v, t, a, b):
    a, b = unit(xp, xp.gelu(a @ w) @ v), unit(xp, xp.gelu(b @ w) @ v)
    logits = xp.exp(t) * (a @ b.T)
    n = xp.arange(64)
    rows = xp.log_softmax(logits, axis=1)[n, n]
    return -0.5 * (rows + xp.log_softmax(logits, axis=0)[n, n]).mean()


@function("w 16 8, t =10, c =-10", TWO)
def sigmoid_loss_of_pairs(xp, w, t, c, a, b):
    logits = t * unit(xp, a @ w) @ unit(xp, b @ w).T + c
    sign = 2 * xp.eye(64) - 1
    return -xp.log_sigmoid(sign * logits).sum() / 64


@function("w 16 8", TWO)
def nt_xent_of_two_views(xp, w, a, b):
    z = xp.concatenate([a @ w, b @ w])
    z = z / xp.sqrt((z * z).sum(-1, keepdims=True) + 1e-12)
    sim = z @ z.T / 0.5 - 1e9 * xp.eye(128)
    n = xp.arange(128)
    return xp.mean(xp.logsumexp(sim, axis=1) - sim[n, (n + 64) % 128])


@function("w 16 8", "a 64 16, b 64 16, c 64 16")
def triplet_loss(xp, w, a, b, c):
    a, b, c = a @ w, b @ w, c @ w
    near, far = ((a - b) ** 2).sum(-1), ((a - c) ** 2).sum(-1)
    return xp.mean(xp.relu(near - far + 1.0))


@function("w 16 8", "a 64 16, b 64 16, c 64 16")
def triplet_loss_of_roots(xp, w, a, b, c):
    a, b, c = xp.tanh(a @ w), xp.tanh(b @ w), xp.tanh(c @ w)
    near = xp.sqrt(((a - b) ** 2).sum(-1) + 1e-12)
    return xp.mean(xp.softplus(near - xp.sqrt(((a - c) ** 2).sum(-1) + 1e-12)))


@function("w 16 8", "a 64 16, b 64 16, y 64 ?")
def contrastive_loss_of_pairs(xp, w, a, b, y):
    d = xp.linalg.norm(a @ w - b @ w, axis=1)
    return xp.mean(y * d**2 + (1 - y) * xp.relu(2.0 - d) ** 2)


@function("w 16 8", "x 64 16, t 64 <6")
def supervised_contrastive_loss(xp, w, x, t):
    z = unit(xp, x @ w)
    logits = z @ z.T / 0.1
    logits = logits - xp.detach(xp.max(logits, axis=1, keepdims=True))
    other = 1 - xp.eye(64)
    same = xp.float(t[:, None] == t[None]) * other
    logp = logits - xp.log((xp.exp(logits) * other).sum(1, keepdims=True) + 1e-12)
    return -xp.mean((same * logp).sum(1) / xp.maximum(same.sum(1), 1.0))


@function("w 16 8, c 10 8", "x 64 16, t 64 <10")
def arc_face(xp, w, c, x, t):
    cos = xp.clip(unit(xp, x @ w) @ unit(xp, c).T, -1 + 1e-6, 1 - 1e-6)
    turned = xp.cos(xp.arccos(cos) + 0.5)
    logits = 30.0 * xp.where(xp.one_hot(t, 10) > 0, turned, cos)
    return -xp.mean(xp.log_softmax(logits)[xp.arange(64), t])


@function("w 16 8, c 10 8", "x 64 16, t 64 <10")
def prototypes_of_squared_distances(xp, w, c, x, t):
    z = x @ w
    d = ((z[:, None] - c[None]) ** 2).sum(-1)
    return -xp.log_softmax(-d)[xp.arange(64), t].mean()


@function("w 16 8, c 10 8", "x 64 16, t 64 <10")
def prototypes_of_expanded_squares(xp, w, c, x, t):
    z = x @ w
    d = (z**2).sum(1, keepdims=True) - 2 * z @ c.T + (c**2).sum(1)
    return -xp.log_softmax(-d)[xp.arange(64), t].mean()


@function("w 16 8", "x 100 16")
def pairwise_distances_by_a_product(xp, w, x):
    z = x @ w
    square = (z * z).sum(1)
    d = square[:, None] + square[None] - 2 * (z @ z.T)
    return xp.sqrt(xp.maximum(d, 0.0) + 1e-4).mean()


@function("w 16 8", "x 100 16")
def uniformity_on_the_sphere(xp, w, x):
    z = unit(xp, x @ w)
    d = ((z[:, None] - z[None]) ** 2).sum(-1)
    return xp.log(xp.mean(xp.exp(-2 * d)))


@function("w 16 8", "x 32 16, y 32 32 %")
def stress_of_a_map(xp, w, x, y):
    z = x @ w
    d = xp.sqrt(((z[:, None] - z[None]) ** 2).sum(-1) + 1e-8)
    return ((d - 3 * y) ** 2).sum() / (y**2).sum()


@function("w 16 2", "x 60 16, p 60 60 %", "params")
def neighbors_of_student(xp, w, x, p):
    z = x @ w
    q = 1 / (1 + ((z[:, None] - z[None]) ** 2).sum(-1)) * (1 - xp.eye(60))
    q = q / q.sum()
    p = p / p.sum()
    return (p * xp.log((p + 1e-9) / (q + 1e-9))).sum()


@function("w 16 8", TWO)
def barlow_twins(xp, w, a, b):
    a, b = a @ w, b @ w
    a, b = (a - a.mean(0)) / xp.std(a, axis=0), (b - b.mean(0)) / xp.std(b, axis=0)
    c = a.T @ b / 64
    on = ((xp.diagonal(c) - 1) ** 2).sum()
    return on + 5e-3 * ((c * (1 - xp.eye(8))) ** 2).sum()


@function("w 16 8", TWO)
def variance_invariance_covariance(xp, w, a, b):
    a, b = a @ w, b @ w
    near = ((a - b) ** 2).mean()
    spread = xp.relu(1 - xp.sqrt(xp.var(a, axis=0) + 1e-4)).mean()
    z = a - a.mean(0)
    cov = z.T @ z / 63
    return 25 * near + 25 * spread + ((cov * (1 - xp.eye(8))) ** 2).sum() / 8


@function("w 16 8, p 8 8", TWO)
def two_views_that_predict_each_other(xp, w, p, a, b):
    a, b = xp.tanh(a @ w), xp.tanh(b @ w)
    left = -(unit(xp, a @ p) * xp.detach(unit(xp, b))).sum(-1).mean()
    return left / 2 - (unit(xp, b @ p) * xp.detach(unit(xp, a))).sum(-1).mean() / 2


@function("w 16 8, c 20 8", TWO)
def teacher_and_student_of_clusters(xp, w, c, a, b):
    student = (a @ w) @ c.T / 0.1
    teacher = xp.detach((b @ w) @ c.T)
    p = xp.softmax((teacher - teacher.mean(0)) / 0.04)
    return -(p * xp.log_softmax(student)).sum(-1).mean()


@function("w 16 8", TWO)
def manhattan_distance(xp, w, a, b):
    return xp.exp(-xp.abs(a @ w - b @ w).sum(-1) / 8).mean()


@function("w 16 8", TWO)
def minkowski_distance(xp, w, a, b):
    d = xp.abs(a @ w - b @ w) + 1e-6
    return ((d**3).sum(-1) ** (1 / 3)).mean()


@function("w 16 8, s 8 8", TWO)
def mahalanobis_distance(xp, w, s, a, b):
    d = a @ w - b @ w
    inverse = xp.linalg.inv(s @ s.T + xp.eye(8))
    return xp.sqrt(xp.einsum("ni,ij,nj->n", d, inverse, d) + 1e-8).mean()


@function("w 16 4", "a 32 16, b 32 16")
def hyperbolic_distance(xp, w, a, b):
    a, b = 0.9 * xp.tanh(a @ w) / 2, 0.9 * xp.tanh(b @ w) / 2
    square = ((a - b) ** 2).sum(-1)
    over = (1 - (a**2).sum(-1)) * (1 - (b**2).sum(-1))
    z = 1 + 2 * square / over
    return xp.log(z + xp.sqrt(z**2 - 1 + 1e-6)).mean()


@function("w 16 3", "a 100 16, b 80 3")
def chamfer_distance(xp, w, a, b):
    d = (((a @ w)[:, None] - b[None]) ** 2).sum(-1)
    return xp.min(d, axis=1).mean() + xp.min(d, axis=0).mean()


@function("w 16 3", "a 40 16, b 40 3")
def entropic_transport(xp, w, a, b):
    cost = (((a @ w)[:, None] - b[None]) ** 2).mean(-1)
    f, g = xp.zeros(40), xp.zeros(40)
    for _ in range(8):
        f = -xp.logsumexp(g[None] - cost, axis=1)
        g = -xp.logsumexp(f[:, None] - cost, axis=0)
    return (xp.exp(f[:, None] + g[None] - cost) * cost).sum() / 40


@function("w 16 50", "x 256 16")
def sliced_wasserstein_distance(xp, w, x):
    p = xp.sort(x @ w, axis=0)
    place = (xp.float(xp.arange(256)) + 0.5) / 256
    return ((p - (2 * place[:, None] - 1)) ** 2).mean()


@function("w 16 8, v 16 8", TWO)
def centered_kernel_alignment(xp, w, v, a, b):
    a, b = a @ w, b @ v
    a, b = a - a.mean(0), b - b.mean(0)
    both = ((a.T @ b) ** 2).sum()
    return -both / (xp.sqrt(((a.T @ a) ** 2).sum()) * xp.sqrt(((b.T @ b) ** 2).sum()))


@function("w 16 8", "x 64 16, y 64 8 !")
def cosine_distance_by_hand(xp, w, x, y):
    p = x @ w
    dot = (p * y).sum(1)
    return 1 - xp.mean(dot / (xp.sqrt((p**2).sum(1)) * xp.sqrt((y**2).sum(1)) + 1e-7))


@function("w 16 8, r 8", "x 64 16, y 64 8, n 64 8")
def translation_of_entities(xp, w, r, x, y, n):
    h = x @ w + r
    near, far = xp.abs(h - y).sum(-1), xp.abs(h - n).sum(-1)
    return xp.relu(1 + near - far).mean()
