"""Rules for language models that use the logits of their head for nothing but the loss and the output."""

from fuseopt.models.policy import Rule, rules


def _heads(path: str, sources: str, *, traces: bool = True) -> tuple[Rule, ...]:
    """Rules for classes, written as "llama.LlamaForCausalLM", whose head is the module at `path`.

    Args:
        traces: True if they compute the loss by F.cross_entropy, False if by a torch.nn.CrossEntropyLoss.
    """
    return rules(sources, "FusedLinearCrossEntropy", {"head": path, "traces": traces})


# Some, such as Mixtral, add the loss of their router.
_OF_DECODERS = (
    *_heads(
        "lm_head",
        """
        afmoe.AfmoeForCausalLM apertus.ApertusForCausalLM arcee.ArceeForCausalLM aria.AriaTextForCausalLM
        axk1.AXK1ForCausalLM axk2.AXK2ForCausalLM bailing_hybrid.BailingHybridForCausalLM
        bitnet.BitNetForCausalLM bloom.BloomForCausalLM codegen.CodeGenForCausalLM cwm.CwmForCausalLM
        deepseek_v2.DeepseekV2ForCausalLM deepseek_v3.DeepseekV3ForCausalLM deepseek_v32.DeepseekV32ForCausalLM
        deepseek_v4.DeepseekV4ForCausalLM diffllama.DiffLlamaForCausalLM doge.DogeForCausalLM
        dots1.Dots1ForCausalLM dots3_note.Dots3NoteForCausalLM emu3.Emu3ForCausalLM ernie4_5.Ernie4_5ForCausalLM
        ernie4_5_moe.Ernie4_5_MoeForCausalLM exaone4.Exaone4ForCausalLM exaone_moe.ExaoneMoeForCausalLM
        falcon.FalconForCausalLM falcon_mamba.FalconMambaForCausalLM flex_olmo.FlexOlmoForCausalLM
        flint.FlintForCausalLM gemma.GemmaForCausalLM gemma3.Gemma3ForCausalLM
        gemma4_unified.Gemma4UnifiedForCausalLM glm.GlmForCausalLM glm4.Glm4ForCausalLM
        glm4_moe.Glm4MoeForCausalLM glm4_moe_lite.Glm4MoeLiteForCausalLM glm_moe_dsa.GlmMoeDsaForCausalLM
        gpt_bigcode.GPTBigCodeForCausalLM gpt_neo.GPTNeoForCausalLM gpt_neox.GPTNeoXForCausalLM
        gpt_oss.GptOssForCausalLM gptj.GPTJForCausalLM helium.HeliumForCausalLM hrm_text.HrmTextForCausalLM
        hunyuan_v1_dense.HunYuanDenseV1ForCausalLM hunyuan_v1_moe.HunYuanMoEV1ForCausalLM hy_v3.HYV3ForCausalLM
        hy_v4.HYV4ForCausalLM inkling.InklingForCausalLM jais2.Jais2ForCausalLM jamba.JambaForCausalLM
        jetmoe.JetMoeForCausalLM kimi_linear.KimiLinearForCausalLM kolibri1.Kolibri1ForCausalLM
        laguna.LagunaForCausalLM lfm2.Lfm2ForCausalLM lfm2_moe.Lfm2MoeForCausalLM lfm3.Lfm3ForCausalLM
        llama.LlamaForCausalLM llama4.Llama4ForCausalLM longcat_flash.LongcatFlashForCausalLM
        mamba.MambaForCausalLM mellum.MellumForCausalLM mimo_v2_flash.MiMoV2FlashForCausalLM
        minimax.MiniMaxForCausalLM minimax_m2.MiniMaxM2ForCausalLM minimax_m3_vl.MiniMaxM3VLForCausalLM
        ministral.MinistralForCausalLM ministral3.Ministral3ForCausalLM mistral.MistralForCausalLM
        mistral4.Mistral4ForCausalLM mixtral.MixtralForCausalLM moshi.MoshiForCausalLM mpt.MptForCausalLM
        nemotron.NemotronForCausalLM nemotron_h.NemotronHForCausalLM olmo.OlmoForCausalLM olmo2.Olmo2ForCausalLM
        olmo3.Olmo3ForCausalLM olmo_hybrid.OlmoHybridForCausalLM olmoe.OlmoeForCausalLM
        openai.OpenAIGPTLMHeadModel opt.OPTForCausalLM persimmon.PersimmonForCausalLM phi.PhiForCausalLM
        phi3.Phi3ForCausalLM phimoe.PhimoeForCausalLM qwen2.Qwen2ForCausalLM qwen2_moe.Qwen2MoeForCausalLM
        qwen3.Qwen3ForCausalLM qwen3_5.Qwen3_5ForCausalLM qwen3_5_moe.Qwen3_5MoeForCausalLM
        qwen3_moe.Qwen3MoeForCausalLM qwen3_next.Qwen3NextForCausalLM qwen4_exp.Qwen4ExpForCausalLM
        seed_oss.SeedOssForCausalLM smollm3.SmolLM3ForCausalLM solar_open.SolarOpenForCausalLM
        stablelm.StableLmForCausalLM starcoder2.Starcoder2ForCausalLM xglm.XGLMForCausalLM
        youtu.YoutuForCausalLM zaya.ZayaForCausalLM
        """,
    ),
    *_heads("output_projection", "biogpt.BioGptForCausalLM"),
    *_heads("embed_out", "gpt_neox_japanese.GPTNeoXJapaneseForCausalLM"),
    *_heads("generator_lm_head", "electra.ElectraForCausalLM"),
    *_heads("decoder", "modernbert_decoder.ModernBertDecoderForCausalLM"),
    *_heads(
        "cls.predictions.decoder",
        """
        bert.BertLMHeadModel ernie.ErnieForCausalLM megatron_bert.MegatronBertForCausalLM
        rembert.RemBertForCausalLM roc_bert.RoCBertForCausalLM roformer.RoFormerForCausalLM
        """,
    ),
    *_heads(
        "lm_head.decoder",
        """
        bert_generation.BertGenerationDecoder camembert.CamembertForCausalLM roberta.RobertaForCausalLM
        roberta_prelayernorm.RobertaPreLayerNormForCausalLM xlm_roberta.XLMRobertaForCausalLM
        xlm_roberta_xl.XLMRobertaXLForCausalLM
        """,
    ),
    *_heads(
        "lm_head",
        """
        bart.BartForCausalLM bigbird_pegasus.BigBirdPegasusForCausalLM blenderbot.BlenderbotForCausalLM
        blenderbot_small.BlenderbotSmallForCausalLM cpmant.CpmAntForCausalLM marian.MarianForCausalLM
        mbart.MBartForCausalLM mvp.MvpForCausalLM pegasus.PegasusForCausalLM plbart.PLBartForCausalLM
        """,
        traces=False,
    ),
    *_heads("lm_loss", "xlnet.XLNetLMHeadModel", traces=False),
    *_heads("output_projection", "trocr.TrOCRForCausalLM", traces=False),
    *_heads("proj_out", "whisper.WhisperForCausalLM", traces=False),
)
_OF_MASKED_MODELS = (
    *_heads("decoder", "modernbert.ModernBertForMaskedLM"),
    *_heads("lm_head", "eurobert.EuroBertForMaskedLM"),
    *_heads("vocab_projector", "distilbert.DistilBertForMaskedLM"),
    *_heads("head.decoder", "ultrabert.UltrabertForMaskedLM"),
    *_heads("predictions.decoder", "albert.AlbertForMaskedLM", traces=False),
    *_heads("lm_head", "funnel.FunnelForMaskedLM", traces=False),
    *_heads("generator_lm_head", "convbert.ConvBertForMaskedLM electra.ElectraForMaskedLM", traces=False),
    *_heads(
        "cls.predictions.decoder",
        """
        bert.BertForMaskedLM big_bird.BigBirdForMaskedLM deberta.DebertaForMaskedLM
        deberta_v2.DebertaV2ForMaskedLM ernie.ErnieForMaskedLM fnet.FNetForMaskedLM layoutlm.LayoutLMForMaskedLM
        megatron_bert.MegatronBertForMaskedLM mra.MraForMaskedLM nomic_bert.NomicBertForMaskedLM
        nystromformer.NystromformerForMaskedLM rembert.RemBertForMaskedLM roc_bert.RoCBertForMaskedLM
        roformer.RoFormerForMaskedLM squeezebert.SqueezeBertForMaskedLM tapas.TapasForMaskedLM
        yoso.YosoForMaskedLM
        """,
        traces=False,
    ),
    *_heads(
        "lm_head.decoder",
        """
        camembert.CamembertForMaskedLM gte.GteForMaskedLM ibert.IBertForMaskedLM
        jina_embeddings_v3.JinaEmbeddingsV3ForMaskedLM longformer.LongformerForMaskedLM mpnet.MPNetForMaskedLM
        roberta.RobertaForMaskedLM roberta_prelayernorm.RobertaPreLayerNormForMaskedLM
        xlm_roberta.XLMRobertaForMaskedLM xlm_roberta_xl.XLMRobertaXLForMaskedLM
        """,
        traces=False,
    ),
)
_OF_ENCODER_DECODERS = (
    *_heads(
        "lm_head",
        """
        m2m_100.M2M100ForConditionalGeneration nllb_moe.NllbMoeForConditionalGeneration
        pegasus_x.PegasusXForConditionalGeneration speech_to_text.Speech2TextForConditionalGeneration
        switch_transformers.SwitchTransformersForConditionalGeneration
        """,
        traces=False,
    ),
    *_heads("proj_out", "whisper.WhisperForConditionalGeneration", traces=False),
)
LM_HEADS = (*_OF_DECODERS, *_OF_MASKED_MODELS, *_OF_ENCODER_DECODERS)
