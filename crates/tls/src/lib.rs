//! TLS between hosts: by which cipher.
//!
//! AES is fast where the processor has instructions for it, and slow where it has none: some embedded processors, virtual machines
//! from which they are hidden, emulated ones. ChaCha20 is fast on all of them (RFC 8439 §1). Memory goes over TLS in the blackout, too,
//! so there ChaCha20 comes first. The client's order decides, and the client is who sends memory.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::{CipherSuite, SupportedCipherSuite};

/// What TLS is made of on this machine.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ordered(has_aes()))
}

/// Has all of this process's TLS be made of [`provider`] that is told of no other. Again it does nothing.
pub fn install() {
    // An error says that there is one, which is this one or the caller's choice.
    let _ = ordered(has_aes()).install_default();
}

/// Whether the processor has instructions for AES, and for the multiplication of GCM.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has =
        std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has = true;
    has
}

/// All ciphers in the order in which they are taken.
fn ordered(has_aes: bool) -> CryptoProvider {
    let mut provider = ring::default_provider();
    if !has_aes {
        // The sort is stable: newer versions of TLS stay before older ones.
        provider.cipher_suites.sort_by_key(|suite| {
            (
                suite.version().version != rustls::ProtocolVersion::TLSv1_3,
                !is_chacha(suite),
            )
        });
    }
    provider
}

fn is_chacha(suite: &SupportedCipherSuite) -> bool {
    matches!(
        suite.suite(),
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256
            | CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
            | CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suites(has_aes: bool) -> Vec<CipherSuite> {
        let suites = ordered(has_aes).cipher_suites.into_iter();
        suites.map(|suite| suite.suite()).collect()
    }

    #[test]
    fn without_instructions_for_aes_chacha_comes_first() {
        use CipherSuite::*;
        assert_eq!(suites(true)[0], TLS13_AES_256_GCM_SHA384);
        let without = suites(false);
        assert_eq!(without[0], TLS13_CHACHA20_POLY1305_SHA256);
        let tls12 = [
            TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
            TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        ];
        assert_eq!(without[3..5], tls12, "behind all of TLS 1.3");
    }

    #[test]
    fn no_cipher_is_lost() {
        let sorted = |has_aes| {
            let mut numbers: Vec<_> = suites(has_aes).into_iter().map(u16::from).collect();
            numbers.sort_unstable();
            numbers
        };
        assert_eq!(sorted(true), sorted(false));
    }

    #[test]
    fn what_is_installed_is_what_is_taken() {
        install();
        install();
        let installed = CryptoProvider::get_default().unwrap();
        let first = |provider: &CryptoProvider| provider.cipher_suites[0].suite();
        assert_eq!(first(installed), first(&provider()));
    }
}
