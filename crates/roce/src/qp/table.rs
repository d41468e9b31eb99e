//! The table of state changes (IBA §10.3.1, tables of required and optional attributes in §11.2.5.2).
//!
//! One table for all: the guest library checks it before it asks, the NIC obeys it, a test prints it.

use super::{AttrMask, ModifyError, QpState, QpType};

/// What a change of state takes, besides `STATE` and `CUR_STATE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Must be given.
    pub required: AttrMask,
    /// May be given.
    pub optional: AttrMask,
}

const fn union<const N: usize>(masks: [AttrMask; N]) -> AttrMask {
    let mut bits = 0;
    let mut i = 0;
    while i < N {
        bits |= masks[i].bits();
        i += 1;
    }
    AttrMask::from_bits_retain(bits)
}

const NONE: AttrMask = AttrMask::empty();

const RC_INIT: AttrMask = union([AttrMask::PKEY_INDEX, AttrMask::PORT, AttrMask::ACCESS_FLAGS]);
const UD_INIT: AttrMask = union([AttrMask::PKEY_INDEX, AttrMask::PORT, AttrMask::QKEY]);
const UC_RTR: AttrMask = union([
    AttrMask::AV,
    AttrMask::PATH_MTU,
    AttrMask::DEST_QPN,
    AttrMask::RQ_PSN,
]);
const RC_RTR: AttrMask = union([UC_RTR, AttrMask::MAX_DEST_RD_ATOMIC, AttrMask::MIN_RNR_TIMER]);
const RC_RTR_OPTIONAL: AttrMask = union([AttrMask::ALT_PATH, AttrMask::ACCESS_FLAGS, AttrMask::PKEY_INDEX]);
const UD_RTR_OPTIONAL: AttrMask = union([AttrMask::PKEY_INDEX, AttrMask::QKEY]);
const RC_RTS: AttrMask = union([
    AttrMask::TIMEOUT,
    AttrMask::RETRY_CNT,
    AttrMask::RNR_RETRY,
    AttrMask::SQ_PSN,
    AttrMask::MAX_QP_RD_ATOMIC,
]);
const UC_LIVE: AttrMask = union([
    AttrMask::ALT_PATH,
    AttrMask::ACCESS_FLAGS,
    AttrMask::PATH_MIG_STATE,
]);
const RC_LIVE: AttrMask = union([UC_LIVE, AttrMask::MIN_RNR_TIMER]);
const UC_DRAINED: AttrMask = union([UC_LIVE, AttrMask::AV, AttrMask::PKEY_INDEX]);
const RC_DRAINED: AttrMask = union([
    UC_DRAINED,
    AttrMask::PORT,
    AttrMask::TIMEOUT,
    AttrMask::RETRY_CNT,
    AttrMask::RNR_RETRY,
    AttrMask::MAX_QP_RD_ATOMIC,
    AttrMask::MAX_DEST_RD_ATOMIC,
    AttrMask::MIN_RNR_TIMER,
]);

/// What it takes to go `from` one state `to` another; `None` where there is no way.
pub const fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<Transition> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    use QpType::{Rc, Uc, Ud};
    let (required, optional) = match (from, to, qp_type) {
        (_, Reset | Err, _) => (NONE, NONE),

        (Reset, Init, Rc | Uc) => (RC_INIT, NONE),
        (Reset, Init, Ud) => (UD_INIT, NONE),
        (Init, Init, Rc | Uc) => (NONE, RC_INIT),
        (Init, Init, Ud) => (NONE, UD_INIT),

        (Init, Rtr, Rc) => (RC_RTR, RC_RTR_OPTIONAL),
        (Init, Rtr, Uc) => (UC_RTR, RC_RTR_OPTIONAL),
        (Init, Rtr, Ud) => (NONE, UD_RTR_OPTIONAL),

        (Rtr, Rts, Rc) => (RC_RTS, RC_LIVE),
        (Rtr, Rts, Uc) => (AttrMask::SQ_PSN, UC_LIVE),
        (Rtr, Rts, Ud) => (AttrMask::SQ_PSN, AttrMask::QKEY),

        (Rts | Sqd, Rts, Rc) => (NONE, RC_LIVE),
        (Rts | Sqd, Rts, Uc) => (NONE, UC_LIVE),
        (Rts | Sqd, Rts, Ud) => (NONE, AttrMask::QKEY),

        (Rts, Sqd, _) => (NONE, AttrMask::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd, Rc) => (NONE, RC_DRAINED),
        (Sqd, Sqd, Uc) => (NONE, UC_DRAINED),
        (Sqd, Sqd, Ud) => (NONE, UD_RTR_OPTIONAL),

        (Sqe, Rts, Uc) => (NONE, AttrMask::ACCESS_FLAGS),
        (Sqe, Rts, Ud) => (NONE, AttrMask::QKEY),

        _ => return None,
    };
    Some(Transition { required, optional })
}

impl Transition {
    /// Looks the change up and checks `mask` against it.
    pub fn check(qp_type: QpType, from: QpState, to: QpState, mask: AttrMask) -> Result<(), ModifyError> {
        let row = transition(qp_type, from, to).ok_or(ModifyError::NoSuchTransition { from, to })?;
        let missing = row.required.difference(mask);
        if !missing.is_empty() {
            return Err(ModifyError::MissingAttributes { from, to, missing });
        }
        let always = AttrMask::STATE | AttrMask::CUR_STATE;
        let unexpected = mask.difference(row.required | row.optional | always);
        if !unexpected.is_empty() {
            return Err(ModifyError::UnexpectedAttributes { from, to, unexpected });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole table for RC as a picture: `.` no way, `+` a way, the number of required attributes where there are.
    #[test]
    fn rc_table_as_a_picture() {
        let picture = QpState::ALL.map(|from| {
            let cells = QpState::ALL.map(|to| match transition(QpType::Rc, from, to) {
                None => ".".to_string(),
                Some(row) if row.required.is_empty() => "+".to_string(),
                Some(row) => row.required.iter().count().to_string(),
            });
            format!("{from:?} {}", cells.concat())
        });
        #[rustfmt::skip]
        assert_eq!(picture.join("\n"), "\
Reset +3....+
Init ++6...+
Rtr +..5..+
Rts +..++.+
Sqd +..++.+
Sqe +.....+
Err +.....+");
    }

    #[test]
    fn refusals_name_the_facts() {
        use QpState::{Init, Reset, Rtr, Rts};
        let check = |from, to, mask| Transition::check(QpType::Rc, from, to, mask);
        assert_eq!(check(Reset, Init, RC_INIT | AttrMask::STATE), Ok(()));
        assert_eq!(
            check(Reset, Init, AttrMask::STATE | AttrMask::PORT),
            Err(ModifyError::MissingAttributes {
                from: Reset,
                to: Init,
                missing: AttrMask::PKEY_INDEX | AttrMask::ACCESS_FLAGS
            })
        );
        assert_eq!(
            check(Init, Rtr, RC_RTR | AttrMask::QKEY),
            Err(ModifyError::UnexpectedAttributes {
                from: Init,
                to: Rtr,
                unexpected: AttrMask::QKEY
            })
        );
        assert_eq!(
            check(Init, Rts, RC_RTS),
            Err(ModifyError::NoSuchTransition { from: Init, to: Rts })
        );
    }
}
