"""Rules for gated feed-forwards, grouped by the names of their children."""

from collections.abc import Mapping

from fuseopt.models.policy import Rule, rules


def gated_mlps(sources: str, **options: str | bool) -> tuple[Rule, ...]:
    """Rules for classes, written as "llama.LlamaMLP mistral.MistralMLP", with options of `modules.FusedGatedMLP`."""
    return rules(sources, "FusedGatedMLP", options, (str(options["act"]),))


_T5: Mapping[str, str] = {"act": "act", "gate": "wi_0", "up": "wi_1", "down": "wo", "dropout": "dropout"}
_LLAMA: Mapping[str, str] = {"act": "act_fn", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

# dropout(act(wi_0(x)) * wi_1(x)), cast to wo's dtype, through wo. LongT5 does not cast.
T5_MLPS = (
    *gated_mlps(
        "mt5.MT5DenseGatedActDense t5.T5DenseGatedActDense umt5.UMT5DenseGatedActDense",
        **_T5,
        keeps_down_dtype=True,
    ),
    *gated_mlps("longt5.LongT5DenseGatedActDense", **_T5),
)
_T5_STYLE_MLPS = gated_mlps(
    """
    kosmos2_5.Kosmos2_5VisionMlp pix2struct.Pix2StructTextDenseGatedActDense pix2struct.Pix2StructVisionMlp
    pop2piano.Pop2PianoDenseGatedActDense udop.UdopDenseGatedActDense
    """,
    **_T5,
    keeps_down_dtype=True,
)

# down_proj(act_fn(gate_proj(x)) * up_proj(x)). Left out: classes whose forward differs between supported versions of
# transformers (DINOv2's SwiGLUFFN and its relatives).
_LLAMA_STYLE_MLPS = gated_mlps(
    """
    afmoe.AfmoeMLP aimv2.Aimv2MLP aria.AriaSharedExpertsMLP axk1.AXK1MLP axk2.AXK2MLP
    bailing_hybrid.BailingHybridMLP bamba.BambaMLP blt.BltMLP chameleon.ChameleonMLP cohere.CohereMLP
    cohere2.Cohere2MLP cohere2_moe.Cohere2MoeMLP cohere_compass.CohereCompassMLP csm.CsmMLP cwm.CwmMLP
    deepseek_ocr2.DeepseekOcr2TextMLP deepseek_ocr2.DeepseekOcr2VisionMLP deepseek_v2.DeepseekV2MLP
    deepseek_v3.DeepseekV3MLP deepseek_v32.DeepseekV32MLP deimv2.Deimv2SwiGLUFFN diffllama.DiffLlamaMLP
    diffusion_gemma.DiffusionGemmaText4MLP dinov3_vit.DINOv3ViTGatedMLP doge.DogeMLP dots1.Dots1MLP
    dots3_note.Dots3NoteTextMLP dots3_note.Dots3NoteVisionMLP embedding_gemma2.EmbeddingGemma2MLP emu3.Emu3MLP
    eomt_dinov3.EomtDinov3GatedMLP ernie4_5.Ernie4_5MLP ernie4_5_moe.Ernie4_5_MoeMLP
    ernie4_5_vl_moe.Ernie4_5_VLMoeMLP esmc.EsmcMLP eurobert.EuroBertMLP evolla.EvollaMLP exaone4.Exaone4MLP
    exaone4_5.Exaone4_5_MLP exaone_moe.ExaoneMoeMLP flex_olmo.FlexOlmoMLP flint.FlintMLP gemma.GemmaMLP
    gemma2.Gemma2MLP gemma3.Gemma3MLP gemma4.Gemma4TextMLP gemma4.Gemma4VisionMLP
    gemma4_unified.Gemma4UnifiedTextMLP glm4_moe.Glm4MoeMLP glm4_moe_lite.Glm4MoeLiteMLP glm4v.Glm4VisionMlp
    glm4v_moe.Glm4vMoeTextMLP glm4v_moe.Glm4vMoeisionMlp glm_moe_dsa.GlmMoeDsaMLP glm_ocr.GlmOcrVisionMlp
    granite.GraniteMLP granite4_vision.Granite4VisionTextMLP granite_docling.GraniteDoclingTextMLP
    granite_swa.GraniteSWAMLP helium.HeliumMLP higgs_audio_v2.HiggsAudioV2MLP hrm_text.HrmTextMLP
    hunyuan_v1_dense.HunYuanDenseV1MLP hunyuan_v1_moe.HunYuanMoEV1MLP hunyuan_vl.HunYuanVLMLP hy_v3.HYV3MLP
    hy_v4.HYV4MLP hyperclovax.HyperCLOVAXMLP idefics.IdeficsMLP idefics2.Idefics2MLP jamba.JambaMLP
    kimi_linear.KimiLinearMLP kolibri1.Kolibri1MLP laguna.LagunaMLP llama.LlamaMLP longcat_flash.LongcatFlashMLP
    mellum.MellumMLP mimo_v2_flash.MiMoV2FlashMLP minicpm3.MiniCPM3MLP ministral.MinistralMLP
    ministral3.Ministral3MLP mistral.MistralMLP mistral4.Mistral4MLP mistral_large4.MistralLarge4TextMLP
    mllama.MllamaTextMLP molmo2.Molmo2ImageProjectorMLP molmo2.Molmo2MLP
    moonshine_streaming.MoonshinMoonshineStreamingDecoderMLP muse_glimmer.MuseGlimmerTextMLP
    muse_glimmer_assistant.MuseGlimmerAssistantMLP muse_spark.MuseSparkTextMLP nomic_bert.NomicBertMLP olmo.OlmoMLP
    olmo2.Olmo2MLP olmo3.Olmo3MLP olmo_hybrid.OlmoHybridMLP olmoe.OlmoeMLP ovis2.Ovis2MLP ovis2.Ovis2VisionMLP
    paddleocr_vl.PaddleOCRMLP pe_audio.PeAudioEncoderMLP pe_audio_video.PeAudioVideoEncoderMLP
    pe_video.PeVideoEncoderMLP pixtral.PixtralMLP qwen2.Qwen2MLP qwen2_5_omni.Qwen2MLP qwen2_5_omni.Qwen2_5OmniMLP
    qwen2_5_vl.Qwen2MLP qwen2_5_vl.Qwen2_5_VLMLP qwen2_moe.Qwen2MoeMLP qwen2_vl.Qwen2MLP qwen3.Qwen3MLP
    qwen3_5.Qwen3_5MLP qwen3_5_moe.Qwen3_5MoeMLP qwen3_moe.Qwen3MoeMLP qwen3_next.Qwen3NextMLP
    qwen3_omni_moe.Qwen3OmniMoeCode2WavMlp qwen3_omni_moe.Qwen3OmniMoeMLP qwen3_omni_moe.Qwen3OmniMoeTalkerTextMLP
    qwen3_omni_moe.Qwen3OmniMoeThinkerTextMLP qwen3_vl.Qwen3VLTextMLP qwen3_vl_moe.Qwen3VLMoeTextMLP
    qwen4_exp.Qwen4ExpTextMLP sapiens2.Sapiens2GatedMLP smollm3.SmolLM3MLP solar_open.SolarOpenMLP
    stablelm.StableLmMLP ultrabert.UltrabertMLP unlimited_ocr.UnlimitedOcrTextMLP vaultgemma.VaultGemmaMLP
    vibevoice.VibeVoiceMLP voxtral_realtime.VoxtralRealtimeMLP voxtral_realtime.VoxtralRealtimeTextMLP
    youtu.YoutuMLP zamba.ZambaMLP
    """,
    **_LLAMA,
)
_LLAMA_STYLE_MLPS_WITH_DROPOUT = gated_mlps(
    "gte.GteMLP t5gemma.T5GemmaMLP t5gemma2.T5Gemma2MLP", **_LLAMA, dropout="dropout"
)

# One projection, whose output is the gate and the other factor, in this order.
_PACKED_MLPS = (
    *gated_mlps(
        """
    dia.DiaMLP dots3_note.Dots3NoteAudioMLP esmfold2.EsmFold2SwiGLU glm.GlmMLP glm4.Glm4MLP glm4v.Glm4vTextMLP
    glm_image.GlmImageTextMLP glm_ocr.GlmOcrTextMLP phi3.Phi3MLP phi4_multimodal.Phi4MultimodalMLP
    """,
        act="activation_fn",
        gate="gate_up_proj",
        down="down_proj",
    ),
    *gated_mlps(
        """
    granitemoe_swa.GraniteMoeSWAMLP granitemoehybrid.GraniteMoeHybridMLP granitemoeshared.GraniteMoeSharedMLP
    """,
        act="activation",
        gate="input_linear",
        down="output_linear",
    ),
)

GATED_MLPS = (*_T5_STYLE_MLPS, *_LLAMA_STYLE_MLPS, *_LLAMA_STYLE_MLPS_WITH_DROPOUT, *_PACKED_MLPS)
