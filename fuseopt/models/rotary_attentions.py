"""Rules for attentions with Llama's rotary embedding, which rotates the two halves of a head, by what else they do.

Left out because of their forward: attentions that rotate in some layers only (SmolLM3, Exaone 4), have dropout after
the last projection (StarCoder2, Seed-OSS), gate their output (Qwen3-Next), or pass positions on (Qwen2-VL). Left out
because of their rotation: adjacent elements (GPT-J, Cohere, GLM, Ernie 4.5), or other roundings (OLMo 2).
"""

from fuseopt.models.policy import Rule, rules


def rotary_attentions(sources: str, **options: object) -> tuple[Rule, ...]:
    """Rules for classes, written as "llama.LlamaAttention", with options of `RotaryAttentionForward`."""
    return rules(sources, "fuseopt.blocks.rotary_embedding.RotaryAttentionForward", options)


_OWN_WINDOW = {"sliding_window": "sliding_window"}
_CONFIG_WINDOW = {"sliding_window": "config.sliding_window"}

ROTARY_ATTENTIONS = (
    *rotary_attentions(
        """
    arcee.ArceeAttention aria.AriaTextAttention bamba.BambaAttention cosmos3_edge.Cosmos3EdgeTextAttention
    csm.CsmAttention deepseek_ocr2.DeepseekOcr2TextAttention dia.DiaSelfAttention emu3.Emu3Attention
    eurobert.EuroBertAttention gemma.GemmaAttention gradium_phonon_tts.GradiumPhononTTSAttention
    granite.GraniteAttention granite4_vision.Granite4VisionTextAttention
    granite_docling.GraniteDoclingTextAttention granitemoe.GraniteMoeAttention
    granitemoeshared.GraniteMoeSharedAttention higgs_audio_v2.HiggsAudioV2Attention hyperclovax.HyperCLOVAXAttention
    jais2.Jais2Attention llama.LlamaAttention phimoe.PhimoeAttention pocket_tts.PocketTTSAttention
    qwen2_moe.Qwen2MoeAttention solar_open.SolarOpenAttention unlimited_ocr.UnlimitedOcrTextAttention
    """
    ),
    *rotary_attentions(
        """
    cwm.CwmAttention deepseek_ocr2.DeepseekOcr2VisionAttention ministral.MinistralAttention qwen2.Qwen2Attention
    """,
        passes=_OWN_WINDOW,
    ),
    *rotary_attentions(
        """
    minimax.MiniMaxAttention mistral.MistralAttention mixtral.MixtralAttention
    voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention
    """,
        passes=_CONFIG_WINDOW,
    ),
    *rotary_attentions(
        "gemma2.Gemma2Attention t5gemma.T5GemmaSelfAttention vaultgemma.VaultGemmaAttention",
        passes={**_OWN_WINDOW, "softcap": "attn_logit_softcapping"},
    ),
    *rotary_attentions("gemma3.Gemma3Attention t5gemma2.T5Gemma2SelfAttention", norms="heads", passes=_OWN_WINDOW),
    *rotary_attentions("apertus.ApertusAttention hy_v3.HYV3Attention", norms="heads"),
    *rotary_attentions(
        """
    dots1.Dots1Attention mellum.MellumAttention qwen3.Qwen3Attention qwen3_moe.Qwen3MoeAttention
    qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention
    qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention
    """,
        norms="projections",
        passes=_OWN_WINDOW,
    ),
    *rotary_attentions("qwen3_vl.Qwen3VLTextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention", norms="projections"),
    *rotary_attentions(
        "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention", packed=True, passes=_CONFIG_WINDOW
    ),
)
