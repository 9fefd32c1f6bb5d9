"""A model exported from torchtitan_ext, in torch and transformers alone.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The folder's config.json names method and section under "torchtitan_ext". ``forward`` gives causal
logits of the next token (t2mlr, looped, tidar, wedlm, alodlm, block_diffusion with causal clean
attention; ``labels`` give the shifted loss), or logits that fill masks (mdlm, tdlm, block_diffusion with
clean attention in blocks; ``labels``, the tokens themselves, count where the input is the mask token).
``generate`` is transformers' own, token by token, for t2mlr, looped, tidar and alodlm, and the method's
decoder (``diffusion_generate``) for mdlm, tdlm, wedlm and block_diffusion. Nothing is cached: every
forward sees the whole text. The package torchtitan_ext decodes much faster, and tidar and alodlm by
their own decoders too; tidar's greedy tokens are the same.

Shape suffixes: B = batch, L = sequence length, D = model dimension, N = heads, H = width of a head,
V = vocabulary, T = remembered forwards.
"""

# pyrefly: ignore-errors
# Modules are put together as attributes, without annotations.

import copy
import math
from itertools import takewhile
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

METHODS = ("alodlm", "block_diffusion", "looped", "mdlm", "t2mlr", "tdlm", "tidar", "wedlm")
DENOISING = ("mdlm", "tdlm")
OWN_DECODER = ("mdlm", "tdlm", "wedlm", "block_diffusion")


class TorchtitanExtConfig(PretrainedConfig):
    """The folder's config.json as it is, its ``model_type`` included."""

    model_type = "torchtitan_ext"

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        """Read a folder, whatever its ``model_type``."""
        values, kwargs = cls.get_config_dict(folder, **kwargs)
        return cls.from_dict(values, **kwargs)

    def to_dict(self):
        """Plain data, with the folder's ``model_type``."""
        values = super().to_dict()
        values["model_type"] = self.__dict__.get("model_type", type(self).model_type)
        return values


def sizes_of(config):
    """The backbone's sizes from a config.json of any supported family."""
    values = config.to_dict()
    family = values["model_type"].rsplit("_", 1)[-1].lower()
    if family == "llada":
        dim, heads = values["d_model"], values["n_heads"]
        names = {"layers": "n_layers", "ffn": "mlp_hidden_size", "context": "max_sequence_length"}
        kv_heads, head_dim = values.get("n_kv_heads") or heads, dim // heads
        vocab = values.get("embedding_size") or values["vocab_size"]
        theta, tied = values.get("rope_theta", 1e4), values["weight_tying"]
    else:
        dim, heads = values["hidden_size"], values["num_attention_heads"]
        names = {
            "layers": "num_hidden_layers",
            "ffn": "intermediate_size",
            "context": "max_position_embeddings",
        }
        kv_heads = values.get("num_key_value_heads") or heads
        head_dim = values.get("head_dim") or (128 if family == "qwen3" else dim // heads)
        vocab, tied = values["vocab_size"], values.get("tie_word_embeddings", False)
        theta = (values.get("rope_parameters") or {}).get("rope_theta") or values.get("rope_theta", 1e4)
    return SimpleNamespace(
        **{ours: values[theirs] for ours, theirs in names.items()},
        family=family,
        dim=dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        theta=float(theta),
        tied=bool(tied),
        eps=float(values.get("rms_norm_eps", 1e-5)),
        std=values.get("initializer_range", 0.02),
    )


# --- the backbone ----------------------------------------------------------------------


def turn(x, cos, sin):
    """Half-rotation; cos and sin broadcast against x's halves."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def angles(positions, width, theta):
    """cos and sin of positions x theta ** (-2u / width), for each u below width / 2."""
    u = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] / theta ** (u / width)
    return angle.cos(), angle.sin()


def attend(size, parts, x_BLD, allowed_B1LL, cos, sin):
    """Attention of one layer, [B, L, D]."""
    q, k, v = (parts[name](x_BLD).unflatten(-1, (-1, size.head_dim)) for name in "qkv")
    if "q_norm" in parts:
        q, k = parts["q_norm"](q), parts["k_norm"](k)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    k, v = (t.repeat_interleave(size.heads // size.kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed_B1LL)
    return parts["o"](z.transpose(1, 2).flatten(2))


def norm(size, width=None):
    return nn.RMSNorm(width or size.dim, eps=size.eps)


class Attention(nn.Module):
    """Projections under transformers' names."""

    def __init__(self, size):
        super().__init__()
        q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
        bias = size.family in ("qwen2", "dream")
        self.q_proj = nn.Linear(size.dim, q, bias=bias)
        self.k_proj = nn.Linear(size.dim, kv, bias=bias)
        self.v_proj = nn.Linear(size.dim, kv, bias=bias)
        self.o_proj = nn.Linear(q, size.dim, bias=False)
        if size.family == "qwen3":
            self.q_norm, self.k_norm = norm(size, size.head_dim), norm(size, size.head_dim)


class FeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)


class Layer(nn.Module):
    """A layer with the names of llama, qwen2, qwen3 and Dream."""

    def __init__(self, size):
        super().__init__()
        self.self_attn, self.mlp = Attention(size), FeedForward(size)
        self.input_layernorm, self.post_attention_layernorm = norm(size), norm(size)

    def parts(self):
        a, m = self.self_attn, self.mlp
        found = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "o": a.o_proj}
        if hasattr(a, "q_norm"):
            found.update(q_norm=a.q_norm, k_norm=a.k_norm)
        norms = {"before": self.input_layernorm, "between": self.post_attention_layernorm}
        return {**found, **norms, "gate": m.gate_proj, "up": m.up_proj, "down": m.down_proj}


class LLaDALayer(nn.Module):
    """A layer with the names of LLaDA."""

    def __init__(self, size):
        super().__init__()
        kv = size.kv_heads * size.head_dim
        self.q_proj, self.attn_out = (nn.Linear(size.dim, size.dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(size.dim, kv, bias=False) for _ in range(2))
        self.ff_proj, self.up_proj = (nn.Linear(size.dim, size.ffn, bias=False) for _ in range(2))
        self.ff_out = nn.Linear(size.ffn, size.dim, bias=False)
        self.attn_norm, self.ff_norm = norm(size), norm(size)

    def parts(self):
        found = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj, "o": self.attn_out}
        norms = {"before": self.attn_norm, "between": self.ff_norm}
        return {**found, **norms, "gate": self.ff_proj, "up": self.up_proj, "down": self.ff_out}


class LlamaBody(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = norm(size)

    def ends(self):
        return self.embed_tokens, self.layers, self.norm


class LLaDABody(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(size.vocab, size.dim)
        self.transformer.blocks = nn.ModuleList(LLaDALayer(size) for _ in range(size.layers))
        self.transformer.ln_f = norm(size)
        if not size.tied:
            self.transformer.ff_out = nn.Linear(size.dim, size.vocab, bias=False)

    def ends(self):
        return self.transformer.wte, self.transformer.blocks, self.transformer.ln_f


# --- what methods add ------------------------------------------------------------------


class Fusion(nn.Module):
    """Phi of T2MLR Eq. 2.3."""

    def __init__(self, dim, features):
        super().__init__()
        self.features = features
        self.f_current, self.f_recurrent = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.w_recurrent = nn.Linear(dim, dim, bias=False)
        self.g_current, self.g_recurrent = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, h_BLD, recurrent_BLD):
        projected = self.w_recurrent(recurrent_BLD)
        seen = torch.cat([h_BLD, recurrent_BLD if self.features == "raw" else projected], dim=-1)
        current, recurrent = (torch.tanh(g).to(h_BLD.dtype) for g in (self.g_current, self.g_recurrent))
        kept = current * torch.sigmoid(self.f_current(seen)) * h_BLD
        return h_BLD + kept + recurrent * torch.sigmoid(self.f_recurrent(seen)) * projected


def recurrent_cache(section, h_BLD, previous_BLD):
    """R_t = Norm(h_t + R_{t-1}), T2MLR Eq. 2.4."""
    if not section.get("temporal_residual", True):
        return h_BLD
    total = h_BLD + previous_BLD
    if section.get("cache_norm", "rmsnorm") == "rmsnorm":
        return F.rms_norm(total, total.shape[-1:], eps=1e-6)
    rms = total.detach().float().square().mean(-1, keepdim=True).sqrt()
    return total * rms.reciprocal().clamp(1 / 5, 5.0).to(total.dtype)


class Temporal(nn.Module):
    """TempAttn of TDLM Eq. 2 and 7 to 10 for one text; keys and values of earlier forwards in lists."""

    def __init__(self, dim, heads, width):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(dim, heads * width, bias=False) for _ in range(3))
        self.wo = nn.Linear(heads * width, dim, bias=False)
        self.sink = nn.Parameter(torch.zeros(1))

    def forward(self, h_BLD, memory, layer):
        """h with the corrections at ``memory.corrected``, [B, L, D]."""
        q, k, v = (w(h_BLD).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        cos, sin = angles(memory.revealed, q.shape[-1], 1e4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        past = memory.past.setdefault(layer, [])
        seen = [(k, v)] if memory.window == "current" else list(past)
        if isinstance(memory.window, int):
            seen = seen[-memory.window :]
        past.append((k, v))
        if not seen:
            return h_BLD
        keys, values = (torch.stack(tensors) for tensors in zip(*seen, strict=True))
        scores = torch.einsum("blnh,tblnh->blnt", q, keys).float() * q.shape[-1] ** -0.5
        sink = self.sink.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat([sink, scores], dim=-1).softmax(dim=-1)[..., 1:].to(v.dtype)
        z = torch.einsum("blnt,tblnh->blnh", weights, values).flatten(2)
        return h_BLD + torch.where(memory.corrected[..., None], self.wo(z), 0)


def temporal_layers(section, count):
    """The layers with a temporal module."""
    layers = section.get("layers", "dispersed")
    if not isinstance(layers, str):
        return sorted(layers)
    chosen = section.get("count") or max(count // 2, 1)
    if layers == "middle":
        return list(range((count - chosen) // 2, (count - chosen) // 2 + chosen))
    return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]


class TorchtitanExtForCausalLM(PreTrainedModel, GenerationMixin):
    """A method's model."""

    config_class = TorchtitanExtConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.size, entry = sizes_of(config), config.torchtitan_ext
        self.method, self.section = entry["name"], entry["section"]
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is not computed here ({', '.join(METHODS)} are)")
        size, section = self.size, self.section
        self.model = LLaDABody(size) if size.family == "llada" else LlamaBody(size)
        if not size.tied and size.family != "llada":
            self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        if self.method == "t2mlr":
            self.core = nn.Module()
            self.core.fusion = Fusion(size.dim, section.get("gate_features", "raw"))
        if self.method == "alodlm":
            self.core = nn.Module()
            self.core.gate = nn.Module()
            self.core.gate.weight = nn.Parameter(torch.zeros(1, size.dim))
            self.core.gate.depth_bias = nn.Parameter(torch.zeros(section["passes"]))
        self.temporal = temporal_layers(section, size.layers) if self.method == "tdlm" else []
        if self.temporal:
            self.layers = nn.ModuleDict()
            for i in self.temporal:
                self.layers[str(i)] = nn.Module()
                self.layers[str(i)].temporal = Temporal(
                    size.dim, section.get("heads", 4), section.get("head_dim", 64)
                )
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """As usual, but tensors that are missing or of another model are an error."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            tied = model.size.tied and kind == "unexpected_keys"
            names = [n for n in info.get(kind, ()) if not (tied and str(n) == "lm_head.weight")]
            if names:
                raise ValueError(
                    f"the folder's tensors do not fit the model: {kind} {sorted(map(str, names))[:5]}"
                )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.size.std)

    def get_input_embeddings(self):
        return self.model.ends()[0]

    def get_output_embeddings(self):
        if self.size.tied:
            return None
        return self.model.transformer.ff_out if self.size.family == "llada" else self.lm_head

    # --- forward -----------------------------------------------------------------------

    @property
    def fills_masks(self):
        """Whether logits fill masks, or predict next tokens."""
        if self.method == "block_diffusion":
            return self.section.get("clean_attention", "block") == "block"
        return self.method in DENOISING

    @property
    def shifted(self):
        """Whether a mask is filled from the position before it."""
        choice = self.section.get("prediction", "auto")
        return self.method in DENOISING and (
            choice == "shifted" or (choice == "auto" and self.size.family == "dream")
        )

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        labels=None,
        generating=False,
        num_items_in_batch=None,
        return_dict=None,
        **kwargs,
    ):
        """Logits [B, L, V], and the loss of ``labels``; padding on either side is not seen.

        ``generating``: t2mlr iterates until nothing changes, and no pause token is ever next.
        """
        for name in ("past_key_values", "inputs_embeds", "output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise ValueError(f"{name} is not supported")
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        if attention_mask is None and position_ids is not None:
            positions = position_ids.expand_as(input_ids)
        else:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            begins = torch.ones_like(real, dtype=torch.bool)
            begins[:, 1:] = real[:, 1:] != real[:, :-1]
            positions = index - (index * begins).cummax(dim=1).values
        logits = self.logits(input_ids, positions, generating=generating, real=attention_mask)
        loss = None if labels is None else self._loss(logits, labels, input_ids, num_items_in_batch)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)

    def logits(self, tokens, positions, *, allowed=None, memory=None, generating=False, real=None):
        """Logits [B, L, V]; ``allowed``: which token sees which, [B, L, L], else the method's rule."""
        pauses = self.section.get("pause_tokens", 1) if self._kind() == "pause" else 0
        pause_id = self.section.get("pause_token_id", -1) % self.size.vocab
        if pauses:
            columns = [tokens, *[torch.full_like(tokens, pause_id)] * pauses]
            tokens = torch.stack(columns, dim=-1).flatten(1)
            within = torch.arange(1 + pauses, device=tokens.device)
            positions = (positions[..., None] * (1 + pauses) + within).flatten(1)
        if allowed is None:
            allowed = self._allowed(positions)
        if memory is None and self.temporal and self.section.get("window") == "current":
            memory = self._memory(tokens, positions, real)
        h = self._hidden(tokens, positions, allowed[:, None], memory, generating)[:, pauses :: 1 + pauses]
        head = self.get_output_embeddings()
        logits = head(h) if head is not None else F.linear(h, self.get_input_embeddings().weight)
        if generating and pauses:
            logits[..., pause_id] = -math.inf
        return logits

    def _kind(self):
        return self.section.get("kind", "middle") if self.method == "looped" else ""

    def _allowed(self, positions):
        """Within documents: in both directions, in own and earlier blocks, or causal, [B, L, L]."""
        ids = (positions == 0).cumsum(dim=1)
        same = ids[:, :, None] == ids[:, None]
        if self.method in DENOISING:
            return same
        if self.fills_masks:
            blocks = positions // self.section["block_size"]
            return same & (blocks[:, :, None] >= blocks[:, None])
        return same & torch.ones_like(same).tril()

    def _memory(self, tokens, positions, real):
        """A tdlm forward without a past."""
        masked = tokens == self.section["mask_token_id"]
        if real is not None:
            masked = masked & real.bool()
        if self.section.get("shift") == "moved":
            masked = masked & (positions > 0)
        return self._remember({}, masked, 0, self.section.get("window", "full"))

    def _remember(self, past, masked, revealed, window):
        corrected = masked
        if self.section.get("shift") == "moved":
            corrected = torch.zeros_like(masked)
            corrected[:, :-1] = masked[:, 1:]
        revealed = torch.tensor(revealed, device=masked.device)
        return SimpleNamespace(past=past, corrected=corrected, revealed=revealed, window=window)

    def _hidden(self, tokens, positions, allowed, memory, generating):
        """Everything before the head, [B, L, D]."""
        embed, layers, last = self.model.ends()
        cos, sin = (t[:, :, None] for t in angles(positions, self.size.head_dim, self.size.theta))

        def run(h, begin, end):
            for i in range(begin, end):
                parts = layers[i].parts()
                h = h + attend(self.size, parts, parts["before"](h), allowed, cos, sin)
                if memory is not None and i in self.temporal:
                    h = self.layers[str(i)].temporal(h, memory, i)
                x = parts["between"](h)
                h = h + parts["down"](F.silu(parts["gate"](x)) * parts["up"](x))
            return h

        count, section, h = len(layers), self.section, embed(tokens)
        if self._kind() in ("middle", "full"):
            first, end = (section["start"] - 1, section["end"]) if self._kind() == "middle" else (0, count)
            h = run(h, 0, first)
            for _ in range(section.get("loops", 2)):
                h = run(h, first, end)
            return last(run(h, end, count))
        if self.method == "t2mlr":
            return last(run(self._recurrent(run, h, positions, generating), section["end"], count))
        if self.method == "alodlm":
            core = run(run(h, 0, section["start"]), section["start"], section["end"])
            for _ in range(section["passes"] - 1):
                core = run(last(core) if section["carry_norm"] else core, section["start"], section["end"])
            return last(run(core, section["end"], count))
        return last(run(h, 0, count))

    def _recurrent(self, run, h, positions, generating):
        """Algorithm 1 of T2MLR: the seed, the iterates, and the pass that goes on."""
        begin, end, phi = self.section["start"] - 1, self.section["end"], self.core.fusion
        h = run(h, 0, begin)
        starts = (positions == 0)[..., None]

        def shift(x):
            return F.pad(x[:, :-1], (0, 0, 1, 0)).masked_fill(starts, 0.0)

        depth = self.section.get("forward_depth", 16)
        if generating:
            depth = max(depth, h.shape[1])  # then it is the exact recurrence
        recurrent = shift(run(h, begin, end))
        for _ in range(depth - 1):
            new = shift(recurrent_cache(self.section, run(phi(h, recurrent), begin, end), recurrent))
            if generating and torch.equal(new, recurrent):
                break
            recurrent = new
        return run(phi(h, recurrent), begin, end)

    def _loss(self, logits, labels, tokens, count):
        labels = labels.to(logits.device)
        if self.fills_masks:
            masked = tokens == self.section["mask_token_id"]
            if not bool(masked.any()):
                raise ValueError("labels are for masked inputs, and no input is the mask token")
            labels = labels.masked_fill(~masked, -100)
        if not self.fills_masks or self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        how = "mean" if count is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=how)
        return loss if count is None else loss / count

    # --- generation --------------------------------------------------------------------

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        """The whole text, in every forward."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "generating": True}

    def generate(self, inputs=None, generation_config=None, **kwargs):
        """See the module's docstring."""
        if self.method in OWN_DECODER and not (self.method == "block_diffusion" and not self.fills_masks):
            return self.diffusion_generate(inputs, generation_config, **kwargs)
        return super().generate(inputs, generation_config, **{**kwargs, "use_cache": False})

    @torch.no_grad()
    def diffusion_generate(
        self, inputs=None, generation_config=None, *, input_ids=None, attention_mask=None, **kwargs
    ):
        """Prompts and new tokens, [B, prompt + new], row by row with the method's decoder.

        Knobs beside max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id and pad_token_id:
        policy, tau, block_size (mdlm, tdlm), window (tdlm, wedlm), tau, position_penalty (wedlm), policy,
        threshold, tokens_per_forward (block_diffusion).
        """
        decoders = {
            "mdlm": (self._denoise, ("policy", "tau", "block_size")),
            "tdlm": (self._denoise, ("policy", "tau", "block_size", "window")),
            "wedlm": (self._stream, ("window", "tau", "position_penalty")),
            "block_diffusion": (self._blocks, ("policy", "threshold", "tokens_per_forward")),
        }
        if self.method not in decoders:
            raise ValueError(f"{self.method} has no diffusion_generate here; use generate")
        decode, names = decoders[self.method]
        knobs = {**self.section, **{name: kwargs.pop(name) for name in names if name in kwargs}}
        rules = copy.deepcopy(generation_config or self.generation_config)
        followed = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "use_cache")
        for name, value in kwargs.items():
            if name not in (*followed, "eos_token_id", "pad_token_id"):
                raise ValueError(f"diffusion_generate does not support {name} (knobs: {', '.join(names)})")
            setattr(rules, name, value)
        eos = rules.eos_token_id
        stops = set() if eos is None else set(torch.as_tensor(eos).flatten().tolist())
        inputs = input_ids if inputs is None else inputs
        if inputs is None or inputs.ndim != 2:
            raise ValueError("diffusion_generate takes input_ids [B, L]")
        keep = torch.ones_like(inputs) if attention_mask is None else attention_mask
        limit = rules.max_new_tokens or 20
        rows = []
        for row, real in zip(inputs, keep, strict=True):
            prompt = row[real.bool()].tolist()
            if len(prompt) + limit > self.size.context:
                raise ValueError(f"a prompt and its new tokens are longer than {self.size.context} tokens")
            rows.append(decode(prompt, limit, stops, rules, knobs))
        width = max(map(len, rows))
        pad = rules.pad_token_id if rules.pad_token_id is not None else min(stops, default=0)
        new = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=inputs.device)
        return torch.cat([inputs, new], dim=1)

    def _choose(self, logits, rules):
        """A token for each row of logits [M, V], its probability, and the entropy of the distribution."""
        logits = logits.float().clone()
        logits[:, self.section["mask_token_id"]] = -math.inf
        probs = logits.softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1)
        if rules.do_sample:
            logits = logits / (rules.temperature or 1.0)
            top_k = 50 if rules.top_k is None else rules.top_k
            if top_k:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            probs = logits.softmax(dim=-1)
            if rules.top_p is not None and rules.top_p < 1:
                ordered, order = probs.sort(dim=-1, descending=True)
                drop = ordered.cumsum(dim=-1) - ordered >= rules.top_p
                probs = probs.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), 0.0)
            tokens = torch.multinomial(probs, 1)[:, 0]
        else:
            tokens = logits.argmax(dim=-1)
        confidence = probs.gather(-1, tokens[:, None])[:, 0]
        return tokens.tolist(), confidence.tolist(), entropy.tolist()

    def _ids(self, tokens):
        mask = self.section["mask_token_id"]
        return torch.tensor([[mask if token is None else token for token in tokens]], device=self.device)

    def _denoise(self, prompt, limit, stops, rules, knobs):
        """Masks behind the prompt are revealed block by block (mdlm, tdlm)."""
        policy = knobs.get("policy") or ("threshold" if self.method == "tdlm" else "one_token")
        tau = knobs.get("tau")
        tau = {"one_token": 0.0, "threshold": 0.9, "entropy": 0.5}[policy] if tau is None else tau
        response, past, revealed = [None] * limit, {}, 0
        while True:
            begin = response.index(None) // knobs["block_size"] * knobs["block_size"]
            places = [i for i in range(begin, min(begin + knobs["block_size"], limit)) if response[i] is None]
            tokens = self._ids([*prompt, *response])
            memory = None
            if self.temporal and knobs.get("window") != "off":
                masked = torch.zeros_like(tokens, dtype=torch.bool)
                masked[0, [len(prompt) + i for i, token in enumerate(response) if token is None]] = True
                memory = self._remember(past, masked, revealed, knobs.get("window", "full"))
            positions = torch.arange(tokens.shape[1], device=self.device)[None]
            read = [len(prompt) + i - self.shifted for i in places]
            chosen, confidence, entropy = self._choose(
                self.logits(tokens, positions, memory=memory)[0, read], rules
            )
            best = [-value for value in entropy] if policy == "entropy" else confidence
            least = -tau if policy == "entropy" else tau
            picked = [] if policy == "one_token" else [i for i, value in enumerate(best) if value > least]
            for i in picked or [max(range(len(best)), key=lambda i: (best[i], -i))]:
                response[places[i]] = chosen[i]
                revealed += 1
            done = self._known(response, stops)
            if done is not None:
                return done

    def _known(self, response, stops):
        """The response up to its first stop token, once everything up to there is known, else None."""
        known = list(takewhile(lambda token: token is not None, response))
        stop = next((i for i, token in enumerate(known) if token in stops), None)
        if stop is not None:
            return known[: stop + 1]
        return known if len(known) == len(response) else None

    def _stream(self, prompt, limit, stops, rules, knobs):
        """A window of masks slides over the text; filled slots stand before masked ones (wedlm)."""
        new, window, text = [], [], list(prompt)
        while True:
            leading = len(list(takewhile(lambda token: token is not None, window)))
            committed = len(text) - len(prompt)
            fresh = leading if window else knobs["window"]
            window += [None] * min(fresh, limit - committed - len(window))
            order = sorted(range(len(window)), key=lambda slot: (window[slot] is None, slot))
            tokens = self._ids([*text, *(window[slot] for slot in order)])
            slots = torch.tensor(order, device=self.device) + len(text)
            positions = torch.cat([torch.arange(len(text), device=self.device), slots])[None]
            allowed = torch.ones(1, *[tokens.shape[1]] * 2, dtype=torch.bool, device=self.device).tril()
            masked = [slot for slot in order if window[slot] is None]
            logits = self.logits(tokens, positions, allowed=allowed)[0, -len(masked) :]
            chosen, _, entropy = self._choose(logits, rules)
            guess = dict(zip(masked, chosen, strict=True))
            full = [guess.get(slot, token) for slot, token in enumerate(window)]
            end = next((slot for slot, token in enumerate(full) if token in stops), len(full))
            scores = {
                slot: value + knobs["position_penalty"] * (slot - masked[0])
                for slot, value in zip(masked, entropy, strict=True)
                if slot <= end
            }
            picked = [slot for slot, value in scores.items() if value < knobs["tau"]]
            for slot in picked or [min(scores, key=lambda slot: (scores[slot], slot))]:
                window[slot] = guess[slot]
            known = list(takewhile(lambda token: token is not None, window))
            new = [*text[len(prompt) :], *known]
            done = self._known(new + [None] * (limit - len(new)), stops)
            if done is not None:
                return done
            text, window = [*text, *window[:leading]], window[leading:]

    def _blocks(self, prompt, limit, stops, rules, knobs):
        """Masks of a block are revealed, then the next block follows (block_diffusion)."""
        size, policy = knobs["block_size"], knobs.get("policy", "threshold")
        causal = knobs.get("clean_attention", "block") == "causal"
        if causal and policy == "left_to_right":
            raise ValueError("left_to_right with causal clean attention is plain generate")
        text = [*prompt, *[None] * limit]
        start = len(prompt) if causal else len(prompt) // size * size
        while True:
            end = min((start // size + 1) * size, len(text))
            places = [i for i in range(start, end) if text[i] is None]
            if not places:
                start = end
                continue
            tokens = self._ids(text[:end])
            positions = torch.arange(end, device=self.device)[None]
            allowed = self._allowed(positions)
            allowed[:, start:] = True
            logits = self.logits(tokens, positions, allowed=allowed)[0, places]
            chosen, confidence, _ = self._choose(logits, rules)
            best = sorted(range(len(places)), key=lambda i: (-confidence[i], i))
            picked = [i for i in best if confidence[i] > knobs["threshold"]] or best[:1]
            if policy != "threshold":
                ranked = best if policy == "confidence" else range(len(places))
                picked = list(ranked)[: knobs["tokens_per_forward"]]
            for i in picked:
                text[places[i]] = chosen[i]
            done = self._known(text[len(prompt) :], stops)
            if done is not None:
                return done
