"""Exported folders in transformers: ``import torchtitan_ext.checkpoint.hf`` and use the Auto classes.

    import torchtitan_ext.checkpoint.hf
    model = AutoModelForCausalLM.from_pretrained(folder)     # TiDARForCausalLM, T2MLRForCausalLM, ...
    model.generate(input_ids, max_new_tokens=64)             # the method's own decoder

How a folder is recognised.  config.json names method and section under "torchtitan_ext".  Its
``model_type`` is the backbone's where the weights alone are a model that plain tools may run: tidar,
wedlm and block_diffusion (llama, qwen2, qwen3: without this import, and for every other tool, such a
folder opens as that backbone) and mdlm (llada, Dream, which transformers does not have).  The methods
that add parameters or run layers more than once (t2mlr, looped, alodlm, tdlm) have a ``model_type`` of
their own, such as torchtitan_ext_t2mlr_llama, so that they cannot open as a backbone that drops tensors
and computes something else: without this import transformers says that it does not know the type, or
asks for the consent to run the folder's own code (``remote``).

Importing this room registers, with ``AutoConfig.register`` and ``AutoModelForCausalLM.register`` alone:

- the own types, and llada and Dream;
- in the place of llama, qwen2 and qwen3 a config class that gives transformers' own config (its class,
  unchanged) for every folder without a "torchtitan_ext" entry, and the method's for one with it. So
  exports of the time before the own types are recognised too.

``trust_remote_code=True`` changes nothing about this, but for mdlm, where it asks for the folder's code.
Folders of the method ar are plain backbones and stay transformers' own models.

``forward`` gives the logits of the loaded checkpoint (:mod:`.model`), ``generate`` and, for methods with
a mask token, ``diffusion_generate`` run the decoder that tools/generate.py runs (:mod:`.generation`).
"""

from torchtitan_ext.checkpoint.hf.auto import register
from torchtitan_ext.checkpoint.hf.config import CONFIGS, MethodConfig
from torchtitan_ext.checkpoint.hf.generation import GenerateOutput
from torchtitan_ext.checkpoint.hf.model import MODELS, MethodForCausalLM

__all__ = ["CONFIGS", "MODELS", "GenerateOutput", "MethodConfig", "MethodForCausalLM"]

register()
