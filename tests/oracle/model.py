"""The model form in float64 numpy, token by token, from the published formulas.

It shares no code with the library: it takes the parameters out of the model and the
numbers out of the configuration, and computes every position of one sequence with
plain loops, as DeepSeek-V4's section 2.3 states them.
"""

import math

import numpy as np


class Oracle:
    """Logits of one sequence, float64[t, v]."""

    def __init__(self, model):
        self.model, self.config = model, model.config

    def __call__(self, tokens) -> np.ndarray:
        config, model = self.config, self.model
        table = value(model.embedding)
        x = np.stack([table[int(token)] for token in tokens])
        for block, layer in zip(model.blocks, config.layers, strict=True):
            normed = norm(x, config.norm_eps, value(block.mixer_norm.weight))
            x = x + Layer(config, layer, block.mixer)(normed)
            normed = norm(x, config.norm_eps, value(block.feed_forward_norm.weight))
            x = x + swiglu(normed, block.feed_forward)
        x = norm(x, config.norm_eps, value(model.final_norm.weight))
        if model.unembed is None:
            return x @ table.T / math.sqrt(config.hidden_size)
        return x @ value(model.unembed.weight)


class Layer:
    """The mixer of one layer over a whole sequence."""

    def __init__(self, config, layer, mixer):
        self.config, self.layer, self.mixer = config, layer, mixer

    def __call__(self, x: np.ndarray) -> np.ndarray:
        config, layer, mixer = self.config, self.layer, self.mixer
        time = len(x)
        shifted = x.copy()
        if config.token_shift:
            for t in range(1, time):
                shifted[t] = x[t] + value(mixer.shift) * x[t - 1]
        latent = x
        if config.query_rank is not None:
            weight = value(mixer.query_down_norm.weight)
            latent = norm(x @ value(mixer.query_down.weight), config.norm_eps, weight)
        query = (latent @ value(mixer.query_up.weight)).reshape(
            time, layer.heads, layer.head_dim
        )
        if config.query_norm:
            query = norm(query, config.norm_eps)
        query = np.stack([self.turn(query[t], t) for t in range(time)])
        exact = self.exact_keys(shifted)
        entries = self.entries(shifted)
        chosen = self.chosen(x, latent, shifted)
        out = np.zeros((time, layer.heads, layer.head_dim))
        group = layer.heads // layer.kv_heads
        for t in range(time):
            for head in range(layer.heads):
                read = []
                for s in self.exact_positions(t):
                    key, val = exact[s]
                    penalty = self.slope(head) * (t - s)
                    read.append((key[head // group], val[head // group], penalty))
                for e in chosen(t):
                    key, val = entries[e]
                    read.append((key[head // group], val[head // group], 0.0))
                out[t, head] = self.attend(query[t, head], read, head)
            if layer.shared_kv:
                out[t] = self.turn(out[t], t, inverse=True)
        return self.project(out.reshape(time, -1))

    def exact_positions(self, t: int) -> range:
        if self.layer.kind == "dense":
            return range(t + 1)
        return range(max(0, t - self.layer.window + 1), t + 1)

    def slope(self, head: int) -> float:
        if self.layer.decay == "none":
            return 0.0
        if self.layer.decay == "learned":
            return max(0.0, float(value(self.mixer.slopes)[head]))
        return 0.0 if head == 0 else self.config.decay_rate / 2 ** (head - 1)

    def attend(self, query, read, head: int) -> np.ndarray:
        logits = [query @ key / math.sqrt(len(query)) - p for key, _, p in read]
        weights = [math.exp(logit) for logit in logits]
        total = sum(weights)
        if self.config.sink:
            total += math.exp(float(value(self.mixer.sink)[head]))
        mixed = np.zeros(len(query))
        for weight, (_, val, _) in zip(weights, read, strict=True):
            mixed += weight / total * val
        return mixed

    def project(self, out: np.ndarray) -> np.ndarray:
        config, mixer = self.config, self.mixer
        if config.output_rank is not None:
            blocks = value(mixer.output_down.weight)
            parts = np.split(out, config.output_groups, axis=1)
            out = np.concatenate(
                [part @ w for part, w in zip(parts, blocks, strict=True)], axis=1
            )
        return out @ value(mixer.output_up.weight)

    # -- keys --------------------------------------------------------------------------

    def key_value(self, features, position: int, weight):
        layer = self.layer
        if layer.shared_kv:
            key = val = features.reshape(layer.kv_heads, layer.head_dim)
        else:
            key, val = features.reshape(2, layer.kv_heads, layer.head_dim)
        if weight is not None:
            key = norm(key, self.config.norm_eps, weight)
        key = self.turn(key, position)
        return key, (key if layer.shared_kv else val)

    def exact_keys(self, shifted):
        own = self.mixer.key_value
        weight = value(own.norm.weight) if self.config.key_norm else None
        features = shifted @ value(own.project.weight)
        return [self.key_value(f, t, weight) for t, f in enumerate(features)]

    def entries(self, shifted):
        if self.layer.kind in ("dense", "swa"):
            return []
        weight = value(self.mixer.entry_norm.weight) if self.config.key_norm else None
        pooled = pool(shifted, self.mixer.compressor, self.layer)
        return [
            self.key_value(f, e * self.layer.ratio, weight)
            for e, f in enumerate(pooled)
        ]

    def chosen(self, x, latent, shifted):
        """t -> the entries that the query at t reads."""
        layer = self.layer
        if layer.kind in ("dense", "swa"):
            return lambda t: ()
        if layer.kind == "hca":
            return lambda t: range((t + 1) // layer.ratio)
        config, indexer = self.config, self.mixer.indexer
        heads, dim = config.index_heads, config.index_dim
        dims = (
            config.rope_dims
            if config.index_rope_dims is None
            else (config.index_rope_dims)
        )
        keys = [
            rotate(
                norm(f, config.norm_eps, value(indexer.norm.weight)),
                e * layer.ratio,
                frequencies(layer.rope, dims),
            )
            for e, f in enumerate(pool(shifted, indexer.compressor, layer))
        ]

        def choose(t: int) -> list[int]:
            query = (latent[t] @ value(indexer.query.weight)).reshape(heads, dim)
            query = rotate(query, t, frequencies(layer.rope, dims))
            weight = x[t] @ value(indexer.weight.weight) / math.sqrt(dim * heads)
            scores = [
                sum(weight[i] * max(0.0, query[i] @ key) for i in range(heads))
                for key in keys[: (t + 1) // layer.ratio]
            ]
            best = sorted(range(len(scores)), key=lambda e: (-scores[e], e))
            return best[: layer.top_k]

        return choose

    def turn(self, x, position: int, inverse: bool = False):
        rope = self.layer.rope
        return rotate(
            x, -position if inverse else position, frequencies(rope, rope.dims)
        )


def pool(x, compressor, layer) -> list[np.ndarray]:
    """Entries of all closed groups, before norm and rotation."""
    features = compressor.features
    both = x @ value(compressor.project.weight)
    width = both.shape[1] // 2
    content, score = both[:, :width], both[:, width:].copy()
    for t in range(len(x)):
        score[t] += value(compressor.slot_score)[t % layer.ratio]
    out = []
    for group in range(len(x) // layer.ratio):
        own = range(group * layer.ratio, (group + 1) * layer.ratio)
        # (content, score) slots: with overlap the first half of the channels of a
        # token feeds the next group's entry, the second half that of its own group.
        if layer.overlap:
            slots = [(content[t, features:], score[t, features:]) for t in own]
            if group:
                before = range((group - 1) * layer.ratio, group * layer.ratio)
                slots += [(content[t, :features], score[t, :features]) for t in before]
        else:
            slots = [(content[t], score[t]) for t in own]
        entry = np.zeros(features)
        for channel in range(features):
            weights = [math.exp(s[channel]) for _, s in slots]
            entry[channel] = sum(
                w * c[channel] for w, (c, _) in zip(weights, slots, strict=True)
            ) / sum(weights)
        out.append(entry)
    return out


def value(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def norm(x, eps: float, weight=None):
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return scaled if weight is None else scaled * weight


def swiglu(x, layer):
    gate, up = np.split(x @ value(layer.gate_up.weight), 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ value(layer.down.weight)


def frequencies(rope, dims: int) -> list[float]:
    """Radians per position of each pair; YaRN by parts (arXiv 2309.00071)."""
    out = []
    for pair in range(dims // 2):
        plain = rope.theta ** (-2 * pair / dims)
        if rope.yarn_factor <= 1:
            out.append(plain)
            continue

        def edge(rotations):
            turns = rope.original_positions / (2 * math.pi * rotations)
            return dims * math.log(turns) / (2 * math.log(rope.theta))

        low = max(math.floor(edge(rope.beta_fast)), 0)
        high = min(math.ceil(edge(rope.beta_slow)), dims - 1)
        ramp = (pair - low) / (high - low if high != low else 0.001)
        ramp = min(max(ramp, 0.0), 1.0)
        out.append(plain / rope.yarn_factor * ramp + plain * (1 - ramp))
    return out


def rotate(x, position: int, angles):
    """Complex multiplication of the trailing pairs (2k, 2k + 1)."""
    x = np.array(x, np.float64)
    start = x.shape[-1] - 2 * len(angles)
    for pair, angle in enumerate(angles):
        a, b = start + 2 * pair, start + 2 * pair + 1
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * position * angle)
        x[..., a], x[..., b] = turned.real, turned.imag
    return x
