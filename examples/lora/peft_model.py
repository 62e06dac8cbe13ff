"""A PEFT model whose LoRA layers end in the op of main.py: `fuseopt.initialize` puts it in."""

import copy

import peft
import torch
import torch.nn.functional as F
from main import epilogue
from transformers import BertConfig, BertForSequenceClassification

import fuseopt


# 1. What stands in for PEFT's LoRA layer, and for which of them.
def has_plain_base(layer) -> bool | str:
    is_plain = type(layer.base_layer) is torch.nn.Linear and layer.base_layer.bias is not None
    return (is_plain and not layer.lora_variant) or "takes plain LoRA over an nn.Linear with a bias"


@fuseopt.replaces("peft.tuners.lora.layer.Linear", when=has_plain_base)
class FusedLoraLinear(fuseopt.FusedModule):
    def forward(self, x, *args, **kwargs):
        # Asked in each call: adapters can be merged, switched off and added later.
        if args or kwargs or self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        base = F.linear(x, self.base_layer.weight)
        delta = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x)))
        return epilogue(base, delta, self.base_layer.bias, self.scaling[name], "none", backend=self.backend)


# 2. A model with adapters, stock and fused: the same loss and the same gradients.
def tiny_bert(device: torch.device) -> peft.PeftModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    adapters = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)
    return peft.get_peft_model(BertForSequenceClassification(config), adapters).to(device).eval()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stock = tiny_bert(device)
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLoraLinear"], "jit": False}}
    model = fuseopt.initialize(copy.deepcopy(stock), config)
    print(fuseopt.report(model))
    batch = {"input_ids": torch.randint(0, 99, (4, 16), device=device), "labels": torch.arange(4, device=device) % 2}
    losses = []
    for each in (stock, model):
        losses.append(each(**batch).loss)
        losses[-1].backward()
    print(f"loss: stock {losses[0].item():.6f}, fused {losses[1].item():.6f}")
    torch.testing.assert_close(losses[1], losses[0])
    print(f"{'trained weight':86} largest gradient  difference from stock")
    for (name, one), two in zip(stock.named_parameters(), model.parameters(), strict=True):
        if one.requires_grad:
            largest, difference = one.grad.abs().max().item(), (one.grad - two.grad).abs().max().item()
            print(f"{name:86} {largest:16.1e} {difference:22.1e}")
            assert difference <= 1e-3 * largest, name


if __name__ == "__main__":
    main()
