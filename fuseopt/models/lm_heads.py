"""Rules for decoders whose `lm_head` makes logits that go nowhere but into the loss and the output."""

from fuseopt.models.policy import rules

# As Llama's; some, as Mixtral's, add a loss of their router's to that of the logits.
LM_HEADS = rules(
    """
    apertus.ApertusForCausalLM arcee.ArceeForCausalLM aria.AriaTextForCausalLM axk1.AXK1ForCausalLM
    axk2.AXK2ForCausalLM bailing_hybrid.BailingHybridForCausalLM bitnet.BitNetForCausalLM cwm.CwmForCausalLM
    deepseek_v2.DeepseekV2ForCausalLM deepseek_v3.DeepseekV3ForCausalLM deepseek_v32.DeepseekV32ForCausalLM
    deepseek_v4.DeepseekV4ForCausalLM diffllama.DiffLlamaForCausalLM dots1.Dots1ForCausalLM
    dots3_note.Dots3NoteForCausalLM emu3.Emu3ForCausalLM ernie4_5.Ernie4_5ForCausalLM
    ernie4_5_moe.Ernie4_5_MoeForCausalLM exaone4.Exaone4ForCausalLM exaone_moe.ExaoneMoeForCausalLM
    flex_olmo.FlexOlmoForCausalLM flint.FlintForCausalLM gemma.GemmaForCausalLM glm.GlmForCausalLM
    glm4.Glm4ForCausalLM glm4_moe.Glm4MoeForCausalLM glm4_moe_lite.Glm4MoeLiteForCausalLM
    glm_moe_dsa.GlmMoeDsaForCausalLM gpt_oss.GptOssForCausalLM helium.HeliumForCausalLM
    hunyuan_v1_dense.HunYuanDenseV1ForCausalLM hunyuan_v1_moe.HunYuanMoEV1ForCausalLM jais2.Jais2ForCausalLM
    jamba.JambaForCausalLM kimi_linear.KimiLinearForCausalLM kolibri1.Kolibri1ForCausalLM laguna.LagunaForCausalLM
    lfm2.Lfm2ForCausalLM lfm2_moe.Lfm2MoeForCausalLM lfm3.Lfm3ForCausalLM llama.LlamaForCausalLM
    longcat_flash.LongcatFlashForCausalLM mellum.MellumForCausalLM mimo_v2_flash.MiMoV2FlashForCausalLM
    minimax.MiniMaxForCausalLM minimax_m2.MiniMaxM2ForCausalLM minimax_m3_vl.MiniMaxM3VLForCausalLM
    ministral.MinistralForCausalLM ministral3.Ministral3ForCausalLM mistral.MistralForCausalLM
    mistral4.Mistral4ForCausalLM mixtral.MixtralForCausalLM olmo.OlmoForCausalLM olmo2.Olmo2ForCausalLM
    olmo3.Olmo3ForCausalLM olmo_hybrid.OlmoHybridForCausalLM olmoe.OlmoeForCausalLM phi.PhiForCausalLM
    phi3.Phi3ForCausalLM phimoe.PhimoeForCausalLM qwen2.Qwen2ForCausalLM qwen2_moe.Qwen2MoeForCausalLM
    qwen3.Qwen3ForCausalLM qwen3_5.Qwen3_5ForCausalLM qwen3_5_moe.Qwen3_5MoeForCausalLM
    qwen3_moe.Qwen3MoeForCausalLM qwen3_next.Qwen3NextForCausalLM qwen4_exp.Qwen4ExpForCausalLM
    seed_oss.SeedOssForCausalLM smollm3.SmolLM3ForCausalLM solar_open.SolarOpenForCausalLM
    starcoder2.Starcoder2ForCausalLM youtu.YoutuForCausalLM
    """,
    "FusedLinearCrossEntropy",
    {"head": "lm_head"},
)
