"""Rules for RMSNorm classes, grouped by what their forward computes.

Left out: classes whose forward differs between supported versions of transformers (DeepSeek-V4, Nemotron-H), and those
that also gate, normalise in groups, or have no weight in some layers.
"""

from fuseopt.models.policy import Rule, rules


def rms_norms(sources: str, *, cast_order: str, eps: str, offset: float = 0.0) -> tuple[Rule, ...]:
    """Rules for classes, written as "llama.LlamaRMSNorm", with options of `modules.FusedRMSNorm` (`ops.rms_norm`)."""
    return rules(sources, "FusedRMSNorm", {"cast_order": cast_order, "eps": eps, "offset": offset})


T5_NORMS = rms_norms(
    "longt5.LongT5LayerNorm mt5.MT5LayerNorm t5.T5LayerNorm umt5.UMT5LayerNorm",
    cast_order="t5",
    eps="variance_epsilon",
)
_LLAMA_STYLE_NORMS = rms_norms(
    """
    aimv2.Aimv2RMSNorm apertus.ApertusRMSNorm arcee.ArceeRMSNorm aria.AriaTextRMSNorm axk1.AXK1RMSNorm
    axk2.AXK2RMSNorm bailing_hybrid.BailingHybridRMSNorm bamba.BambaRMSNorm bitnet.BitNetRMSNorm blt.BltRMSNorm
    chameleon.ChameleonRMSNorm clvp.ClvpRMSNorm cohere2_moe.Cohere2MoeRMSNorm cosmos3_edge.Cosmos3EdgeTextRMSNorm
    csm.CsmRMSNorm cwm.CwmRMSNorm deepseek_ocr2.DeepseekOcr2TextRMSNorm deepseek_ocr2.DeepseekOcr2VisionRMSNorm
    deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm deepseek_v32.DeepseekV32RMSNorm
    deimv2.Deimv2RMSNorm dia.DiaRMSNorm diffllama.DiffLlamaRMSNorm doge.DogeRMSNorm dots1.Dots1RMSNorm
    dots3_note.Dots3NoteRMSNorm emu3.Emu3RMSNorm ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm
    ernie4_5_vl_moe.Ernie4_5_VLMoeRMSNorm eurobert.EuroBertRMSNorm evolla.EvollaRMSNorm exaone4.Exaone4RMSNorm
    exaone4_5.Exaone4_5_RMSNorm exaone_moe.ExaoneMoeRMSNorm falcon_h1.FalconH1RMSNorm
    falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm glm4.Glm4RMSNorm glm4_moe.Glm4MoeRMSNorm
    glm4_moe_lite.Glm4MoeLiteRMSNorm glm4v.Glm4vRMSNorm glm4v_moe.Glm4vMoeRMSNorm glm4v_moe.Glm4vMoeTextRMSNorm
    glm5_next.Glm5NextRMSNorm glm5_next.Glm5NextTextRMSNorm glm_image.GlmImageRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm
    glm_ocr.GlmOcrRMSNorm granite.GraniteRMSNorm granite4_vision.Granite4VisionTextRMSNorm
    granite_docling.GraniteDoclingTextRMSNorm granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm
    granitemoe_swa.GraniteMoeSWARMSNorm granitemoehybrid.GraniteMoeHybridRMSNorm
    granitemoeshared.GraniteMoeSharedRMSNorm higgs_audio_v2.HiggsAudioV2RMSNorm
    hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm hunyuan_vl.HunYuanVLRMSNorm
    hy_v3.HYV3RMSNorm hy_v4.HYV4RMSNorm hyperclovax.HyperCLOVAXRMSNorm idefics2.Idefics2RMSNorm
    idefics3.Idefics3RMSNorm inkling.InklingRMSNorm internvl.InternVLVisionRMSNorm jamba.JambaRMSNorm
    jetmoe.JetMoeRMSNorm kimi_linear.KimiLinearRMSNorm kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm
    lfm2.Lfm2RMSNorm lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm lfm3_vl.Lfm3VlVisionRMSNorm
    lighton_ocr.LightOnOcrRMSNorm llama.LlamaRMSNorm longcat_flash.LongcatFlashRMSNorm mamba.MambaRMSNorm
    mamba2.Mamba2RMSNorm mellum.MellumRMSNorm mimo_v2_flash.MiMoV2FlashRMSNorm minicpm3.MiniCPM3RMSNorm
    minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm
    mistral.MistralRMSNorm mistral3.Mistral3RMSNorm mistral4.Mistral4RMSNorm mistral_large4.MistralLarge4RMSNorm
    mixtral.MixtralRMSNorm mllama.MllamaTextRMSNorm molmo2.Molmo2RMSNorm
    muse_glimmer_assistant.MuseGlimmerAssistantRMSNorm neucodec.NeuCodecRMSNorm olmoe.OlmoeRMSNorm
    ovis2.Ovis2RMSNorm paddleocr_vl.PaddleOCRRMSNorm pe_audio.PeAudioEncoderRMSNorm
    pe_audio_video.PeAudioVideoEncoderRMSNorm pe_video.PeVideoEncoderRMSNorm phi3.Phi3RMSNorm
    phi4_multimodal.Phi4MultimodalRMSNorm pixtral.PixtralRMSNorm qianfan_ocr.QianfanOCRVisionRMSNorm
    qwen2.Qwen2RMSNorm qwen2_5_omni.Qwen2_5OmniRMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm qwen2_moe.Qwen2MoeRMSNorm
    qwen2_vl.Qwen2VLRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm
    qwen3_omni_moe.Qwen3OmniMoeCode2WavRMSNorm qwen3_omni_moe.Qwen3OmniMoeRMSNorm
    qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm
    qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm sapiens2.Sapiens2RMSNorm
    seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm solar_open.SolarOpenRMSNorm timesfm.TimesFmRMSNorm
    timesfm2_5.TimesFm2_5RMSNorm ultrabert.UltrabertRMSNorm ultravbert.UltraVBertRMSNorm
    unlimited_ocr.UnlimitedOcrTextRMSNorm vibevoice.VibeVoiceRMSNorm
    vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerRMSNorm vibevoice_asr.VibeVoiceAsrRMSNorm
    voxtral_realtime.VoxtralRealtimeRMSNorm xcodec2.Xcodec2RMSNorm youtu.YoutuRMSNorm zamba.ZambaRMSNorm
    zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
    """,
    cast_order="llama",
    eps="variance_epsilon",
)
# Computed in float32 up to the product with the weight, then cast.
_WEIGHT_BEFORE_CAST_NORMS = rms_norms(
    """
    afmoe.AfmoeRMSNorm beam.BeamRMSNorm flex_olmo.FlexOlmoRMSNorm flint.FlintRMSNorm gpt_oss.GptOssRMSNorm
    helium.HeliumRMSNorm inkling2.Inkling2RMSNorm nemotron_h_omni.NemotronH_Omni_RMSNorm olmo2.Olmo2RMSNorm
    olmo3.Olmo3RMSNorm olmo_hybrid.OlmoHybridRMSNorm openai_privacy_filter.OpenAIPrivacyFilterRMSNorm
    """,
    cast_order="input",
    eps="variance_epsilon",
)
_GEMMA_STYLE_NORMS = rms_norms(
    """
    gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm minimax_m3_vl.MiniMaxM3VLRMSNorm
    muse_glimmer.MuseGlimmerTextCenteredRMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm
    qwen3_next.Qwen3NextRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm step3p7.Step3p7RMSNorm
    t5gemma.T5GemmaRMSNorm t5gemma2.T5Gemma2RMSNorm vaultgemma.VaultGemmaRMSNorm
    """,
    cast_order="input",
    eps="eps",
    offset=1.0,
)

RMS_NORMS = (
    *T5_NORMS,
    *rms_norms("idefics.IdeficsRMSNorm", cast_order="t5", eps="variance_epsilon"),
    *_LLAMA_STYLE_NORMS,
    *rms_norms("llama4.Llama4TextRMSNorm", cast_order="llama", eps="eps"),
    *_WEIGHT_BEFORE_CAST_NORMS,
    *rms_norms("kyutai_speech_to_text.KyutaiSpeechToTextRMSNorm moshi.MoshiRMSNorm", cast_order="input", eps="eps"),
    *_GEMMA_STYLE_NORMS,
)
